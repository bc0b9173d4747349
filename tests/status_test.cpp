// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "beaconkv/status.hpp"

#include <limits>
#include <memory>
#include <string>

#include "beaconkv/types.hpp"
#include "beaconkv/version.hpp"
#include "support/check.hpp"

namespace {

using namespace beaconkv;
using namespace beaconkv::test;

TEST_CASE("A status is ok, or an error with a message") {
  const Status ok;
  CHECK(ok.ok());
  CHECK(static_cast<bool>(ok));
  CHECK(ok.code() == StatusCode::ok);
  CHECK(ok.message().empty());

  const Status bad(StatusCode::out_of_order, "position = 3");
  CHECK_FALSE(bad.ok());
  CHECK_FALSE(static_cast<bool>(bad));
  CHECK(bad.code() == StatusCode::out_of_order);
  CHECK(bad.message() == "position = 3");
}

TEST_CASE("Success allocates nothing") {
  bool ok = false;
  CHECK(allocations_of([&] {
          const Status status;
          const Status copy = status;
          const Result<index_t> result = index_t{3};
          ok = copy.ok() && result.ok();
        }) == 0);
  CHECK(ok);
}

TEST_CASE("A result is a value or the status that says why there is none") {
  const Result<int> good = 7;
  CHECK(good.ok());
  CHECK(*good == 7);
  CHECK(good.status().ok());

  const Result<int> bad = detail::invalid("k = ", -1);
  CHECK_FALSE(bad.ok());
  CHECK_FALSE(static_cast<bool>(bad));
  check_invalid(bad.status(), {"k = -1"});

  Result<std::string> text = std::string("abc");
  CHECK(text->size() == 3);
  *text += "d";
  CHECK(*text == "abcd");
}

TEST_CASE("A result carries what can only be moved") {
  Result<std::unique_ptr<int>> result = std::make_unique<int>(5);
  const std::unique_ptr<int> value = std::move(result).or_throw();
  CHECK(*value == 5);
}

TEST_CASE("or_throw throws the code and the message, and only for errors") {
  Status().or_throw();
  CHECK(Result<int>(3).or_throw() == 3);
  const auto check_thrown = [](auto&& call) {
    try {
      call();
      FAIL("nothing was thrown");
    } catch (const Error& error) {
      CHECK(error.code() == StatusCode::unsupported);
      CHECK(std::string(error.what()) == "no");
    }
  };
  check_thrown([] { Status(StatusCode::unsupported, "no").or_throw(); });
  check_thrown([] { static_cast<void>(Result<int>(Status(StatusCode::unsupported, "no")).or_throw()); });
}

TEST_CASE("Messages are made of texts and numbers of any type") {
  const Status status =
      detail::error(StatusCode::stale_plan, "a = ", std::int8_t{-5}, ", b = ", std::numeric_limits<std::uint64_t>::max(),
                    ", c = ", std::string("text"), ", d = ", std::numeric_limits<std::int64_t>::min());
  CHECK(status.code() == StatusCode::stale_plan);
  CHECK(status.message() == "a = -5, b = 18446744073709551615, c = text, d = -9223372036854775808");
  CHECK(detail::invalid("scale = ", -0.5F).message().find("-0.5") != std::string::npos);
}

TEST_CASE("A message shows the digits of small and large numbers") {
  CHECK(detail::invalid("scale = ", -1e-9F).message().find("1e-09") != std::string::npos);
  CHECK(detail::invalid("theta = ", -2.5e300).message().find("2.5e+300") != std::string::npos);
}

TEST_CASE("A shape has positive sizes, and as many query heads for every KV head") {
  CHECK(validate(Shape{.query_heads = 1, .kv_heads = 1, .head_dim = 1}).ok());
  CHECK(validate(Shape{.query_heads = 32, .kv_heads = 8, .head_dim = 128}).ok());
  CHECK(Shape{.query_heads = 28, .kv_heads = 4, .head_dim = 128}.group() == 7);
  check_invalid(validate(Shape{.query_heads = 4, .kv_heads = 0, .head_dim = 8}), {"kv_heads = 0"});
  check_invalid(validate(Shape{.query_heads = 4, .kv_heads = -2, .head_dim = 8}), {"kv_heads = -2"});
  check_invalid(validate(Shape{.query_heads = 4, .kv_heads = 2, .head_dim = 0}), {"head_dim = 0"});
  check_invalid(validate(Shape{.query_heads = 5, .kv_heads = 2, .head_dim = 8}), {"query_heads = 5", "kv_heads = 2"});
  check_invalid(validate(Shape{.query_heads = 0, .kv_heads = 2, .head_dim = 8}), {"query_heads = 0"});
  check_invalid(validate(Shape{.query_heads = -4, .kv_heads = 2, .head_dim = 8}), {"query_heads = -4"});
}

TEST_CASE("Views of queries find a row in both orders") {
  float memory[2 * 3 * 4] = {};
  const QueryView by_token = QueryView::token_major(memory, 2, 3, 4);
  const QueryView by_head = QueryView::head_major(memory, 2, 3, 4);
  CHECK(by_token.row(1, 2) == memory + (1 * 3 + 2) * 4);
  CHECK(by_head.row(1, 2) == memory + (2 * 2 + 1) * 4);
  CHECK(by_head.tokens == 2);
  CHECK(by_head.heads == 3);
  CHECK(ConstRows{memory, 3, 2, 5}.row(2) == memory + 10);
  CHECK(Range{3, 7}.size() == 4);
}

}  // namespace
