// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT

// Event logs on disk: what is written is read back to the bit, and what was damaged is refused by line and reason.

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "policy_lab/event_lines.hpp"
#include "support/files.hpp"
#include "support/sequence_run.hpp"

using namespace beaconkv;
using namespace beaconkv::lab;
using namespace beaconkv::test;

namespace {

void require_same_tokens(const std::vector<LoggedToken>& a, const std::vector<LoggedToken>& b) {
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    REQUIRE(a[i].position == b[i].position);
    REQUIRE(a[i].score.has_value() == b[i].score.has_value());
    if (a[i].score) REQUIRE(bits_of(*a[i].score) == bits_of(*b[i].score));
  }
}
void require_same_runs(const std::vector<EventRun>& a, const std::vector<EventRun>& b) {
  REQUIRE(a.size() == b.size());
  for (std::size_t r = 0; r < a.size(); ++r) {
    REQUIRE(a[r].problem == b[r].problem);
    REQUIRE(a[r].policy == b[r].policy);
    REQUIRE(a[r].budget == b[r].budget);
    REQUIRE(a[r].events.size() == b[r].events.size());
    for (std::size_t e = 0; e < a[r].events.size(); ++e) {
      const EvictionEvent& x = a[r].events[e];
      const EvictionEvent& y = b[r].events[e];
      REQUIRE(x.step == y.step);
      REQUIRE(x.layer == y.layer);
      REQUIRE(x.seconds == y.seconds);
      REQUIRE(x.bytes_freed == y.bytes_freed);
      REQUIRE(x.heads.size() == y.heads.size());
      for (std::size_t h = 0; h < x.heads.size(); ++h) {
        require_same_tokens(x.heads[h].evicted, y.heads[h].evicted);
        require_same_tokens(x.heads[h].kept, y.heads[h].kept);
        REQUIRE(x.heads[h].queries.size() == y.heads[h].queries.size());
        for (std::size_t q = 0; q < x.heads[h].queries.size(); ++q) {
          REQUIRE(x.heads[h].queries[q].beacons == y.heads[h].queries[q].beacons);
          REQUIRE(x.heads[h].queries[q].recent == y.heads[h].queries[q].recent);
        }
      }
    }
  }
}

/// What a policy logs over some tokens.
template <class PolicyT>
[[nodiscard]] EventRun run_of(const char* name, const PolicyT& policy, Random& random) {
  Layers<PolicyT> s(policy, 2);
  EventLog log;
  s->set_event_log(&log);
  LayerStreams streams(random, 2);
  run_conversation(*s, streams, 10, 60);
  REQUIRE(log.events().size() > 2);
  return {"problem \"7\" \xC3\xA4", name, small_budget, log.take()};
}

const std::string head = R"({"format":"beaconkv-evictions","version":1,"problem":"p","policy":"q","budget":8,"events":1})";
const std::string one_head =
    R"({"evicted":{"positions":[2,5],"scores":[0.5,"nan"]},"kept":{"positions":[0,7],"scores":[null,1]},"queries":[{"beacons":[1],"recent":[6,7]}]})";
const std::string event = R"({"step":7,"layer":0,"seconds":0.25,"bytes_freed":64,"heads":[)" + one_head + "]}";

[[nodiscard]] std::string error_of(const std::string& text) {
  const TemporaryFile file(text);
  const Result<std::vector<EventRun>> runs = read_events(file.path());
  REQUIRE_FALSE(runs.ok());
  return runs.status().message();
}
/// The error where `from` stands as `to` in the eviction of a file of two lines.
[[nodiscard]] std::string error_with(const std::string& from, const std::string& to) {
  std::string line = event;
  const std::size_t found = line.find(from);
  REQUIRE(found != std::string::npos);
  return error_of(head + "\n" + line.replace(found, from.size(), to) + "\n");
}

}  // namespace

TEST_CASE("event logs of every policy are read back to the bit", "[event_lines]") {
  Random random;
  CAPTURE(random.seed());
  std::vector<EventRun> runs;
  for_each_policy([&](const char* name, auto policy) { runs.push_back(run_of(name, policy, random)); });
  runs.push_back({"nothing evicted", "full", 0, {}});
  const TemporaryFile file;
  require_ok(write_events(file.path(), runs));
  require_same_runs(require_value(read_events(file.path())), runs);
  const std::string text = text_of(file.path());
  std::size_t lines = runs.size();
  for (const EventRun& run : runs) lines += run.events.size();
  REQUIRE(static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n')) == lines);
}

TEST_CASE("scores that are no numbers, and the smallest and largest, survive", "[event_lines]") {
  EvictionEvent odd{.step = (position_t{1} << 62) + 1, .layer = 3, .seconds = 1e-9, .bytes_freed = 0};
  HeadEvent scores;
  position_t position = 0;
  for (const std::uint32_t bits :
       {nan_bits, infinity_bits, infinity_bits | 0x80000000U, 0x80000000U, 0U, 1U, 0x7F7FFFFFU, 0x3DCCCCCDU})
    scores.kept.push_back({position++, float_of(bits)});
  odd.heads = {scores, {}};
  const std::vector<EventRun> runs{{"", "", 0, {odd}}};
  const TemporaryFile file;
  require_ok(write_events(file.path(), runs));
  require_same_runs(require_value(read_events(file.path())), runs);
}

TEST_CASE("the documented lines are read", "[event_lines]") {
  const TemporaryFile file(head + "\n" + event + "\n");
  const std::vector<EventRun> runs = require_value(read_events(file.path()));
  REQUIRE(runs.size() == 1);
  REQUIRE(runs[0].policy == "q");
  const EvictionEvent& read = runs[0].events[0];
  REQUIRE(read.step == 7);
  REQUIRE(read.seconds == 0.25);
  REQUIRE(read.bytes_freed == 64);
  REQUIRE(read.heads[0].evicted[0].position == 2);
  REQUIRE(read.heads[0].evicted[0].score == 0.5F);
  REQUIRE(std::isnan(*read.heads[0].evicted[1].score));
  REQUIRE_FALSE(read.heads[0].kept[0].score);
  REQUIRE(read.heads[0].queries[0].recent == std::vector<position_t>{6, 7});
}

TEST_CASE("damaged lines are refused by number and reason", "[event_lines]") {
  const std::string whole = head + "\n" + event + "\n";
  require_says(error_of(whole + "{\n"), {"line 3", "not JSON"});
  require_says(error_of(whole + "\n"), {"line 3"});
  require_says(error_of(whole + event + "\n"), {"line 3", "head of a run", "format"});
  require_says(error_of(head + "\n"), {"line 2", "ends", "1 more"});
  require_says(error_of(head + "\n" + head + "\n"), {"line 2", "step"});
  require_says(error_of("[]\n"), {"line 1", "object"});
  std::string other = head;
  require_says(error_of(other.replace(other.find("version\":1"), 10, "version\":2")), {"line 1", "version = 2", "1"});
  other = head;
  require_says(error_of(other.replace(other.find("evictions"), 9, "evasions!")), {"line 1", "format", "beaconkv-evasions!"});
  // Cut anywhere, it is never taken for a whole one.
  for (std::size_t cut = 1; cut + 1 < whole.size(); ++cut) {
    CAPTURE(cut);
    const TemporaryFile file(whole.substr(0, cut));
    REQUIRE_FALSE(read_events(file.path()).ok());
  }

  require_says(error_with("\"step\":7,", ""), {"line 2", "no 'step'"});
  require_says(error_with("\"step\"", "\"stop\""), {"line 2", "no 'step'"});
  require_says(error_with("\"step\":7", "\"step\":7,\"stop\":1"), {"line 2", "stop", "not known"});
  require_says(error_with("\"step\":7", "\"step\":7,\"step\":8"), {"line 2", "step", "twice"});
  require_says(error_with("\"step\":7", "\"step\":-7"), {"line 2", "step = -7"});
  require_says(error_with("\"layer\":0", "\"layer\":0.5"), {"line 2", "layer = 0.5"});
  require_says(error_with("0.25", "-0.25"), {"line 2", "seconds = -0.25"});
  require_says(error_with("64", "\"64\""), {"line 2", "bytes_freed = \"64\""});
  require_says(error_with("[2,5]", "[5,2]"), {"line 2", "heads[0].evicted.positions[1] = 2", "ascend"});
  require_says(error_with("[2,5]", "[5,5]"), {"line 2", "heads[0].evicted.positions[1] = 5", "ascend"});
  require_says(error_with("[2,5]", "[2]"), {"line 2", "heads[0].evicted", "1 positions", "2 scores"});
  require_says(error_with("[2,5]", "[2,9223372036854775808]"), {"line 2", "positions[1] = 9223372036854775808"});
  require_says(error_with("[2,5]", "[2,7]"), {"line 2", "heads[0]", "position 7", "both"});
  require_says(error_with("\"nan\"", "\"nana\""), {"line 2", "heads[0].evicted.scores[1] = \"nana\""});
  require_says(error_with("0.5", "1e39"), {"line 2", "scores[0] = 1e+39"});
  require_says(error_with("0.5", "true"), {"line 2", "scores[0] = true"});
  require_says(error_with("[6,7]", "[7,6]"), {"line 2", "heads[0].queries[0].recent[1] = 6", "ascend"});
  require_says(error_with("[1]", "{}"), {"line 2", "heads[0].queries[0].beacons = {}", "list"});
  require_says(error_with("\"heads\":[", "\"heads\":[3,"), {"line 2", "heads[0] = 3", "object"});
}

TEST_CASE("files that are not there, or cannot be written, are named", "[event_lines]") {
  require_says(read_events("/no/such/file.jsonl").status().message(), {"/no/such/file.jsonl"});
  require_says(write_events("/no/such/file.jsonl", {}).message(), {"/no/such/file.jsonl"});
}
