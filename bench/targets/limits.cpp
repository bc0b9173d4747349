// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

/// \file
/// What the machine can do at all: a target beyond it is out of reach here, whoever writes the kernel.

#include <cstring>

#include "attention_step.hpp"
#include "targets/paths.hpp"

namespace beaconkv::bench {
namespace {

constexpr index_t products = 12;  // at a time, each waiting only for itself: as many as hide the latency

/// `rounds` times `products` vectors of multiply-adds.
struct MultiplyAdd {
  template <class Isa>
  BEACONKV_KERNEL void run(const float* in, index_t rounds, float* out) noexcept {
    typename Isa::Floats sums[static_cast<std::size_t>(products)];
    typename Isa::Floats factor;
    beaconkv::detail::load(factor, in);
    BEACONKV_UNROLL for (index_t i = 0; i < products; ++i) sums[i] = factor * static_cast<float>(i);
    for (index_t r = 0; r < rounds; ++r) {
      BEACONKV_UNROLL for (index_t i = 0; i < products; ++i) sums[i] = sums[i] * factor + factor;
    }
    BEACONKV_UNROLL for (index_t i = 1; i < products; ++i) sums[0] += sums[i];
    beaconkv::detail::store(out, sums[0]);
  }
};

void arithmetic(Report& report) {
  const std::string name = "limit/multiply_add";
  if (!report.wants({name})) return;
  constexpr index_t rounds = 1 << 20;
  const std::vector<float> in(16, 0.5F);
  std::vector<float> out(16);
  const double seconds = fastest({report.pace().seconds / 4, report.pace().rounds}, [&] {
    beaconkv::detail::run<MultiplyAdd>(in.data(), rounds, out.data());
    keep(out);
  })[0];
  const index_t width = instruction_set() == InstructionSet::avx512 ? 16 : (instruction_set() == InstructionSet::avx2 ? 8 : 4);
  report.number(name, 2e-9 * static_cast<double>(rounds * products * width) / seconds, "GF/s",
                "one core, with the kernels' instruction set");
}

void memory(Report& report, index_t kib) {
  const std::string read = "limit/read/" + std::to_string(kib) + "_KiB";
  const std::string copy = "limit/memcpy/" + std::to_string(kib) + "_KiB";
  if (!report.wants({read, copy})) return;
  const index_t count = kib * 256;
  const index_t repeats = std::max<index_t>(1, 4096 / kib);
  std::vector<float> from(static_cast<std::size_t>(count), 1.0F);
  std::vector<float> to(from);
  const auto [reading, copying] = fastest(
      {report.pace().seconds / 4, report.pace().rounds},
      [&] {
        for (index_t i = 0; i < repeats; ++i)
          keep(read_cache({1, 1, 64}, from.data(), from.data() + count / 2, count / 128, count / 128));
      },
      [&] {
        for (index_t i = 0; i < repeats; ++i) {
          std::memcpy(to.data(), from.data(), static_cast<std::size_t>(count) * sizeof(float));
          keep(to);
        }
      });
  const double bytes = 1e-9 * static_cast<double>(repeats * count) * sizeof(float);
  report.number(read, bytes / reading, "GB/s", "one core");
  report.number(copy, bytes / copying, "GB/s", "one core, bytes copied");
}

}  // namespace

void measure_limits(Report& report) {
  arithmetic(report);
  for (const index_t kib : {256, 8192, 131072}) memory(report, kib);
}

}  // namespace beaconkv::bench
