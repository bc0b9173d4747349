// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// The conformance program must notice: every answer of every case is falsified once, and every kind of unreadable input is
// tried.

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "beaconkv/kernel/instruction_set.hpp"
#include "npy.hpp"
#include "runner.hpp"
#include "support/catch.hpp"

namespace fs = std::filesystem;
using beaconkv::index_t;

namespace {

const fs::path data = fs::path(BEACONKV_SOURCE_DIR) / "tests" / "data";

struct Ran {
  int code;
  std::string out;
  std::string err;
};

Ran run(const std::vector<std::string>& arguments) {
  std::ostringstream out;
  std::ostringstream err;
  const int code = beaconkv::conformance::run(arguments, out, err);
  return {code, out.str(), err.str()};
}

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  REQUIRE(file);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void write_file(const fs::path& path, const std::string& content) {
  std::ofstream file(path, std::ios::binary);
  file << content;
  REQUIRE(file);
}

/// A folder of its own that holds copies of cases; gone afterwards.
class Copies {
 public:
  Copies()
      : root_(fs::temp_directory_path() /
              ("beaconkv_conformance_" + std::to_string(::getpid()) + "_" + std::to_string(++count_))) {
    fs::remove_all(root_);
    fs::create_directories(root_);
  }
  ~Copies() {
    std::error_code ignored;
    fs::remove_all(root_, ignored);
  }
  Copies(const Copies&) = delete;
  Copies& operator=(const Copies&) = delete;

  fs::path add(const std::string& method, const std::string& name) {
    const fs::path to = root_ / method / name;
    fs::create_directories(to.parent_path());
    fs::copy(data / method / name, to);
    return to;
  }
  const fs::path& root() const { return root_; }

 private:
  static inline int count_ = 0;
  fs::path root_;
};

/// Where the data of an `.npy` file begins.
std::size_t data_offset(const std::string& npy) {
  return 10 + static_cast<unsigned char>(npy.at(8)) + std::size_t{256} * static_cast<unsigned char>(npy.at(9));
}

template <class T>
void add_to(std::string& npy, std::size_t element, T amount) {
  char* const at = npy.data() + data_offset(npy) + element * sizeof(T);
  T value;
  std::memcpy(&value, at, sizeof(T));
  value += amount;
  std::memcpy(at, &value, sizeof(T));
}

/// One element becomes another: a float by a hundredth of the largest, an integer by 1. False where there is no element.
bool falsify(const fs::path& path, std::mt19937& random) {
  std::string npy = read_file(path);
  const beaconkv::conformance::AnyArray array = beaconkv::conformance::read_npy(path);
  const auto pick = [&](std::size_t n) { return std::uniform_int_distribution<std::size_t>(0, n - 1)(random); };
  if (const auto* floats = std::get_if<beaconkv::conformance::FloatArray>(&array)) {
    if (floats->data.empty()) return false;
    float largest = 0;
    for (const float v : floats->data) largest = std::max(largest, std::fabs(v));
    add_to(npy, pick(floats->data.size()), largest > 0 ? largest / 100 : 1.0F);
  } else {
    const auto& integers = std::get<beaconkv::conformance::IndexArray>(array);
    if (integers.data.empty()) return false;
    add_to(npy, pick(integers.data.size()), std::int64_t{1});
  }
  write_file(path, npy);
  return true;
}

/// What a case asks with; everything else is an answer.
bool is_input(const std::string& method, const std::string& array) {
  static const std::set<std::string> inputs{"x",       "q",       "k",          "v",     "q_obs", "q_pre",
                                            "beacons", "recents", "recent_pos", "k_pos", "pos",   "to"};
  if (array == "attentions" || array == "q_prerope") return true;
  if (method == "kvpress_adakv") return array == "scores";
  return inputs.contains(array) || (method == "kvpress_key_rerotation" && array != "k_out");
}

bool is_exact(const fs::path& folder) {
  return nlohmann::json::parse(read_file(folder / "params.json")).value("exact_indices", true);
}

std::vector<fs::path> entries(const fs::path& folder) {
  std::vector<fs::path> found;
  for (const auto& entry : fs::directory_iterator(folder)) found.push_back(entry.path());
  std::sort(found.begin(), found.end());
  return found;
}

void replace_text(const fs::path& path, const std::string& from, const std::string& to) {
  std::string content = read_file(path);
  const std::size_t at = content.find(from);
  REQUIRE(at != std::string::npos);
  write_file(path, content.replace(at, from.size(), to));
}

}  // namespace

TEST_CASE("every answer of every case is compared") {
  std::mt19937 random(beaconkv::test::seed());
  index_t falsified = 0;
  for (const fs::path& method_folder : entries(data)) {
    if (!fs::is_directory(method_folder)) continue;
    const std::string method = method_folder.filename().string();
    for (const fs::path& original : entries(method_folder)) {
      const std::string name = original.filename().string();
      if (!fs::is_directory(original) || !is_exact(original)) continue;  // no arrays, or several sets are right
      Copies copies;
      const fs::path copy = copies.add(method, name);
      for (const fs::path& file : entries(copy)) {
        const std::string array = file.stem().string();
        if (file.extension() != ".npy" || is_input(method, array)) continue;
        if (!falsify(file, random)) continue;
        const Ran ran = run({copies.root().string()});
        INFO("seed " << beaconkv::test::seed() << ", " << method << "/" << name << ", falsified " << array << "\n"
                     << ran.out << ran.err);
        CHECK(ran.code == 1);
        CHECK(ran.err.find(method + "/" + name + ": " + array) == 0);
        CHECK(ran.out.find(method + " cases 1 failed 1 max_score_diff ") == 0);
        write_file(file, read_file(original / file.filename()));
        ++falsified;
      }
    }
  }
  CHECK(falsified > 300);
}

TEST_CASE("ties are judged by scores, and can be judged wrong") {
  std::mt19937 random(beaconkv::test::seed());
  Copies copies;
  const fs::path fps = copies.add("fps", "90_duplicates_and_zeros");
  const fs::path tie = copies.add("rkv_snapkv", "07_boundary_tie");
  REQUIRE(run({copies.root().string()}).code == 0);

  std::string selected = read_file(fps / "selected.npy");
  add_to(selected, 0, std::int64_t{1});
  write_file(fps / "selected.npy", selected);
  REQUIRE(falsify(tie / "scores.npy", random));
  const Ran ran = run({copies.root().string()});
  INFO("seed " << beaconkv::test::seed() << "\n" << ran.err);
  CHECK(ran.code == 1);
  CHECK(ran.err.find("fps/90_duplicates_and_zeros: selected") != std::string::npos);
  CHECK(ran.err.find("rkv_snapkv/07_boundary_tie: scores") != std::string::npos);
}

TEST_CASE("answers beside arrays, and those of cases that tie, are compared, too") {
  std::mt19937 random(beaconkv::test::seed());
  Copies copies;
  const fs::path budgets = copies.root() / "kvpress_pyramidkv" / "budgets.json";
  fs::create_directories(budgets.parent_path());
  fs::copy_file(data / "kvpress_pyramidkv" / "budgets.json", budgets);
  REQUIRE(run({copies.root().string()}).code == 0);
  replace_text(budgets, "936", "937");
  Ran ran = run({copies.root().string()});
  CHECK(ran.code == 1);
  CHECK(ran.err.find("kvpress_pyramidkv/budgets.json: budgets (row 0): at [0]: expected 937, is 936") == 0);
  replace_text(budgets, "q_len", "q_lengths");
  ran = run({copies.root().string()});
  CHECK(ran.code == 2);
  CHECK(ran.err.find("'rows': ") != std::string::npos);
  fs::remove_all(budgets.parent_path());

  for (const char* const name : {"02", "03", "04"}) {
    const fs::path lag = copies.add("kvpress_lagkv", name);
    REQUIRE(run({copies.root().string()}).code == 0);
    REQUIRE(falsify(lag / "scores.npy", random));
    ran = run({copies.root().string()});
    CHECK(ran.code == 1);
    CHECK(ran.err.find(std::string("kvpress_lagkv/") + name + ": scores") == 0);
    fs::remove_all(lag);
  }
}

TEST_CASE("one line a method, one more a case if asked") {
  Copies copies;
  copies.add("fps", "01_n32_m16_d128");
  copies.add("fps", "91_all_identical");
  fs::create_directories(copies.root() / "kvpress_cur" / "01");
  write_file(copies.root() / "README.md", "not a method");

  const Ran quiet = run({copies.root().string()});
  CHECK(quiet.code == 0);
  CHECK(quiet.err.empty());
  CHECK(quiet.out == "fps cases 2 failed 0 max_score_diff 0\nkvpress_cur cases 1 skipped\n");

  const Ran verbose = run({"--verbose", copies.root().string()});
  CHECK(verbose.code == 0);
  CHECK(verbose.out.find("fps/01_n32_m16_d128 ok max_score_diff 0\n") == 0);
}

TEST_CASE("a difference says where, and what was expected") {
  Copies copies;
  const fs::path folder = copies.add("fps", "91_all_identical");  // rows 0, 1, 2, ... in this order
  std::string selected = read_file(folder / "selected.npy");
  add_to(selected, 3, std::int64_t{7});
  write_file(folder / "selected.npy", selected);
  const Ran ran = run({"--verbose", copies.root().string()});
  CHECK(ran.code == 1);
  CHECK(ran.err == "fps/91_all_identical: selected: at [3]: expected 10, is 3 (1 of 8 differ)\n");
  CHECK(ran.out.find("fps/91_all_identical failed selected: at [3]: expected 10, is 3") == 0);
}

TEST_CASE("what cannot be read is named") {
  Copies copies;
  const fs::path folder = copies.add("rkv", "09_direction_first");
  const fs::path k = folder / "k.npy";
  const auto check = [&](const std::string& file, const std::string& what) {
    const Ran ran = run({copies.root().string()});
    INFO(ran.err);
    CHECK(ran.code == 2);
    CHECK(ran.err.find("rkv/09_direction_first: ") == 0);
    CHECK(ran.err.find(file) != std::string::npos);
    CHECK(ran.err.find(what) != std::string::npos);
  };

  SECTION("truncated data") {
    const std::string npy = read_file(k);
    write_file(k, npy.substr(0, npy.size() - 4));
    check("k.npy", "truncated");
  }
  SECTION("truncated header") {
    write_file(k, read_file(k).substr(0, 40));
    check("k.npy", "truncated");
  }
  SECTION("empty file") {
    write_file(k, "");
    check("k.npy", "no .npy file");
  }
  SECTION("more data than the shape says") {
    write_file(k, read_file(k) + "1234");
    check("k.npy", "does not go with");
  }
  SECTION("format 2.0") {
    std::string npy = read_file(k);
    npy[6] = 2;
    write_file(k, npy);
    check("k.npy", "format 2.0");
  }
  SECTION("Fortran order") {
    replace_text(k, "False", "True ");
    check("k.npy", "fortran_order");
  }
  SECTION("unknown type") {
    replace_text(k, "<f4", "<f2");
    check("k.npy", "<f2");
  }
  SECTION("shape that overflows") {
    replace_text(k, "'shape': (", "'shape': (999999999999, 999999999999, ");
    check("k.npy", "does not go with");
  }
  SECTION("integers for floats") {
    fs::copy_file(folder / "kept.npy", k, fs::copy_options::overwrite_existing);
    check("k.npy", "must hold floats");
  }
  SECTION("shape that is not the parameters'") {
    replace_text(folder / "params.json", "\"head_dim\": 32", "\"head_dim\": 31");
    check(".npy", "shape");
  }
  SECTION("missing array that params.json lists") {
    fs::remove(folder / "redundancy.npy");
    check("redundancy.npy", "missing");
  }
  SECTION("missing params.json") {
    fs::remove(folder / "params.json");
    check("params.json", "cannot be read");
  }
  SECTION("params.json that is no JSON") {
    write_file(folder / "params.json", "{\"kv_heads\": ");
    check("params.json", "parse error");
  }
  SECTION("missing parameter") {
    replace_text(folder / "params.json", "\"budget\"", "\"budged\"");
    check("params.json", "'budget' is missing");
  }
  SECTION("parameter of another type") {
    replace_text(folder / "params.json", "\"retain_direction\": \"first\"", "\"retain_direction\": 1");
    check("params.json", "'retain_direction' is no string");
  }
}

TEST_CASE("what the library has not is a failure, not an error") {
  Copies copies;
  const fs::path folder = copies.add("snapkv", "01_gqa2_d32");
  SECTION("unknown pool") {
    replace_text(folder / "params.json", "avgpool", "medianpool");
    const Ran ran = run({copies.root().string()});
    CHECK(ran.code == 1);
    CHECK(ran.err.find("medianpool") != std::string::npos);
  }
  SECTION("even kernel") {
    replace_text(folder / "params.json", "\"kernel_size\": 5", "\"kernel_size\": 4");
    const Ran ran = run({copies.root().string()});
    CHECK(ran.code == 1);
    CHECK(ran.err.find("the library refuses: pool.kernel = 4") != std::string::npos);
  }
}

TEST_CASE("an instruction set can be forced") {
  using namespace beaconkv;
  const InstructionSet before = instruction_set();
  Copies copies;
  copies.add("snapkv", "01_gqa2_d32");
  const std::string root = copies.root().string();
  const std::string usual = run({root}).out;
  for (const InstructionSet set : {InstructionSet::baseline, InstructionSet::avx2, InstructionSet::avx512}) {
    CAPTURE(name_of(set));
    use_instruction_set(before).or_throw();
    const Ran ran = run({"--instruction-set", name_of(set), root});
    if (is_supported(set)) {
      CHECK(ran.code == 0);
      CHECK(ran.out.starts_with(usual.substr(0, usual.find("max_score_diff"))));
      CHECK(std::count(ran.out.begin(), ran.out.end(), '\n') == 1);
      CHECK(instruction_set() == set);
    } else {
      CHECK(ran.code == 2);
      CHECK(ran.err.find(name_of(set)) != std::string::npos);
      CHECK(instruction_set() == before);
    }
  }
  use_instruction_set(before).or_throw();
  const Ran unknown = run({"--instruction-set", "sse9", root});
  CHECK(unknown.code == 2);
  CHECK(unknown.err.find("instruction set = 'sse9': must be baseline, avx2 or avx512") != std::string::npos);
  CHECK(run({root, "--instruction-set"}).code == 2);
  CHECK(instruction_set() == before);
}

TEST_CASE("wrong usage is refused") {
  Copies copies;
  const std::string root = copies.root().string();
  CHECK(run({}).code == 2);
  CHECK(run({}).err.find("no DIR") != std::string::npos);
  CHECK(run({"--quiet", root}).code == 2);
  CHECK(run({"--help"}).code == 0);
  CHECK(run({root + "/absent"}).code == 2);
  CHECK(run({root + "/absent"}).err.find("absent: cannot be read") != std::string::npos);
  CHECK(run({root}).code == 2);
  CHECK(run({root}).err.find("no folder METHOD/CASE") != std::string::npos);
  fs::create_directories(copies.root() / "rkv");
  CHECK(run({root}).code == 2);
  CHECK(run({root}).err.find("rkv: has no cases") != std::string::npos);
  fs::create_directories(copies.root() / "not_a_method" / "01");
  CHECK(run({root}).code == 2);
  CHECK(run({root}).err.find("there is no method 'not_a_method'") != std::string::npos);
}
