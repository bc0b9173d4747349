// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// Farthest point sampling and its continual form, each by itself.

#include <beaconkv/algorithm/continual_fps.hpp>
#include <cmath>
#include <cstdio>
#include <vector>

using namespace beaconkv;

int main() {
  // Eight directions of the plane, crowded around the first.
  std::vector<float> rows;
  for (const float degrees : {0.F, 2.F, 4.F, 6.F, 8.F, 90.F, 180.F, 270.F}) {
    rows.push_back(std::cos(degrees * 3.14159265F / 180));
    rows.push_back(std::sin(degrees * 3.14159265F / 180));
  }
  const ConstRows points{rows.data(), 8, 2, 2};

  Workspace work(fps_workspace_size(8, 2));
  std::vector<slot_t> picked(4);
  farthest_point_sampling(points, 4, picked, work).or_throw();
  std::printf("four of eight directions that cover them:");
  for (const slot_t p : picked) std::printf(" %d", p);

  // The same rows as a stream, of which at most five are remembered.
  ContinualFps stream = ContinualFps::make(2, 4, 5).or_throw();
  Workspace scratch(stream.workspace_size());
  for (index_t i = 0; i < points.rows; ++i) stream.push(points.row(i), i, scratch).or_throw();
  std::printf("\nremembered of the stream:");
  for (const position_t tag : stream.tags()) std::printf(" %td", static_cast<index_t>(tag));
  std::printf("\n");
  return stream.size() == 4 ? 0 : 1;
}
