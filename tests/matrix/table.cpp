// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include <fstream>
#include <sstream>

#include "matrix/matrix.hpp"

using namespace beaconkv;
using namespace beaconkv::test::matrix;

TEST_CASE("README's support table is what the matrix runs", "[matrix]") {
  std::ifstream file(BEACONKV_SOURCE_DIR "/README.md");
  std::stringstream readme;
  readme << file.rdbuf();
  std::string table =
      "| layout | float | float16 | bfloat16 | int8 | q8_0 | fp8 e4m3 | fp8 e5m2 | float16 K, q8_0 V |\n"
      "|---|---|---|---|---|---|---|---|---|\n";
  for (const EngineRow& row : engines) {
    const auto cell = [&](bool holds) { table += holds ? " yes |" : " - |"; };
    table += "| " + std::string(row.name) + " |";
    cell(holds<float, float>(row.engine));
    cell(holds<float16, float16>(row.engine));
    cell(holds<bfloat16, bfloat16>(row.engine));
    cell(holds<std::int8_t, std::int8_t>(row.engine));
    cell(holds<q8_0, q8_0>(row.engine));
    cell(holds<float8_e4m3, float8_e4m3>(row.engine));
    cell(holds<float8_e5m2, float8_e5m2>(row.engine));
    cell(holds<float16, q8_0>(row.engine));
    table += "\n";
  }
  INFO("README.md must hold this table:\n" << table);
  CHECK(readme.str().find(table) != std::string::npos);
}
