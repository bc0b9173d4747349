// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include <vector>

#include "beaconkv/algorithm/rope.hpp"
#include "methods.hpp"

namespace beaconkv::conformance {

void run_rope(const Case& c, Report& report) {
  const FloatArray x = c.floats("x", {Case::any, c.integer("head_dim")});
  const index_t rows = x.dim(0);
  const FloatArray y = c.floats("y", {rows, x.dim(1)});
  const FloatArray moved = c.floats("moved", {rows, x.dim(1)});
  const IndexArray pos = c.integers("pos", {rows});
  const IndexArray to = c.integers("to", {rows});
  const RopeTable rope = rope_of(c, x.dim(1));

  std::vector<float> rotated = x.data;
  std::vector<float> realigned = y.data;
  for (index_t i = 0; i < rows; ++i) {
    const auto at = static_cast<std::size_t>(i);
    rope.rotate(rotated.data() + i * x.dim(1), pos.data[at]);
    rope.realign(realigned.data() + i * x.dim(1), pos.data[at], to.data[at]);
  }
  report.compare("y", y, rotated);
  report.compare("moved", moved, realigned);
  if (c.has("inv_freq")) {
    const std::vector<float> rounded(rope.inv_freq().begin(), rope.inv_freq().end());
    report.compare("inv_freq", c.floats("inv_freq", {rope.pairs()}), rounded);
  }
  if (c.has_param("attention_factor"))
    report.compare("attention_factor", FloatArray{{1}, {static_cast<float>(c.number("attention_factor"))}},
                   std::vector<float>{static_cast<float>(rope.attention_factor())});
}

}  // namespace beaconkv::conformance
