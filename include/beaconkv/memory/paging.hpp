// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// For engines that keep K/V in pages and apply a plan by themselves (a kernel on a GPU, say): which rows move from page to
/// page, which pages are free afterwards, which must be copied first. Page numbers only: nothing here touches keys or values.
///
/// In this order: `page_changes`; a copy of each page that it names (`PageTable::make_own`); the moves of
/// `for_each_paged_move`; `PageTable::truncate`; the policy's `commit`. Engines with a pool and a table of their own need only
/// the two functions.

#include <algorithm>
#include <limits>
#include <span>
#include <vector>

#include "beaconkv/keep_plan.hpp"

namespace beaconkv::inline v0 {

using page_t = std::int32_t;           ///< number of a page in its pool
inline constexpr page_t no_page = -1;  ///< stands in table entries that are not in use

/// `count` rows that move from one page to another, or within one.
struct PagedMove {
  page_t to_page = no_page;
  index_t to_offset = 0;
  page_t from_page = no_page;
  index_t from_offset = 0;
  index_t count = 0;
  [[nodiscard]] bool operator==(const PagedMove&) const noexcept = default;
};

namespace detail {

[[nodiscard]] constexpr index_t pages_of(index_t tokens, index_t page_size) noexcept {
  return tokens / page_size + (tokens % page_size != 0 ? 1 : 0);
}

/// Empty where every slot that the plan speaks of has a page.
[[nodiscard]] inline Status validate_page_table(const KeepPlan& plan, index_t page_size, std::span<const page_t> table) {
  if (page_size < 1) return invalid("page_size = ", page_size, ": must be at least 1");
  if (plan.sets() == 0) return error(StatusCode::stale_plan, "plan is empty");
  const index_t used = pages_of(plan.tokens_before(), page_size);
  if (static_cast<index_t>(table.size()) < used)
    return invalid("table has ", table.size(), " entries: the plan's ", plan.tokens_before(), " tokens are in ", used,
                   " pages");
  for (index_t p = 0; p < used; ++p)
    if (table[static_cast<std::size_t>(p)] < 0)
      return invalid("table[", p, "] = ", table[static_cast<std::size_t>(p)], ": no page, but the plan's ",
                     plan.tokens_before(), " tokens need it");
  return {};
}

}  // namespace detail

/// Calls `f(PagedMove)` for the rows of `head` that change their place (of all heads where they keep one set), runs cut where a
/// page of source or destination ends. Carried out one after the other they are safe in place and need no second buffer; rows
/// of one move may overlap, so they go in ascending order too (or by `memmove`).
///
/// \param table page numbers of the sequence, in order, before the plan. O(pages + moves), allocates nothing. Refused, without
/// a call, where an entry that is needed is missing or -1.
template <class F>
[[nodiscard]] Status for_each_paged_move(const KeepPlan& plan, index_t head, index_t page_size, std::span<const page_t> table,
                                         F&& f) {
  if (Status s = detail::validate_page_table(plan, page_size, table); !s) return s;
  if (head < 0 || (plan.sets() > 1 && head >= plan.sets()))
    return detail::invalid("head = ", head, ": the plan has ", plan.sets(), " sets");
  plan.for_each_move(head, [&](index_t to, index_t from, index_t count) {
    while (to != from && count > 0) {
      const index_t n = std::min({count, page_size - to % page_size, page_size - from % page_size});
      f(PagedMove{table[static_cast<std::size_t>(to / page_size)], to % page_size,
                  table[static_cast<std::size_t>(from / page_size)], from % page_size, n});
      to += n;
      from += n;
      count -= n;
    }
  });
  return {};
}

/// What a plan does to the pages of a sequence. Ranges are of table entries.
struct PageChanges {
  Range unchanged{};      ///< keep number and content. All others lose their identity: drop hashes of prefixes there
  Range written{};        ///< rows move into these
  Range released{};       ///< unused once the rows have moved; the entries before them stay
  index_t num_freed = 0;  ///< of the released ones, those that nobody else holds
  index_t num_freed_in_place =
      0;                      ///< that would be free if no row moved: no head keeps a slot there, and nobody else holds them
  index_t num_need_copy = 0;  ///< of the written ones, those that others hold too: copy them first
};

/// What applying `plan` (all its heads) does to the pages of `table`; changes nothing.
///
/// \param table page numbers of the sequence, in order, before the plan.
/// \param ref_count `ref_count(page)`: how many hold a page; answer 1 where nothing is shared.
/// \param need_copy takes the entries that need a copy, ascending, as far as it reaches; `num_need_copy` counts them all.
/// O(pages * sets * log L), allocates nothing. Refused where an entry that is needed is missing or -1.
template <class RefCount>
[[nodiscard]] Result<PageChanges> page_changes(const KeepPlan& plan, index_t page_size, std::span<const page_t> table,
                                               RefCount&& ref_count, std::span<index_t> need_copy = {}) {
  if (Status s = detail::validate_page_table(plan, page_size, table); !s) return s;
  const auto own = [&](index_t entry) { return ref_count(table[static_cast<std::size_t>(entry)]) <= 1; };
  const index_t used = detail::pages_of(plan.tokens_before(), page_size);
  const index_t prefix = plan.unchanged_prefix();
  PageChanges changes;
  changes.unchanged = {0, prefix < plan.tokens_before() ? prefix / page_size : used};
  index_t kept = 0;  // of the longest head
  index_t first_written = std::numeric_limits<index_t>::max();
  index_t end_written = 0;
  for (index_t s = 0; s < plan.sets(); ++s) {
    kept = std::max(kept, plan.num_kept(s));
    if (plan.unchanged_prefix(s) == plan.num_kept(s)) continue;  // nothing moves; else everything behind its prefix does
    first_written = std::min(first_written, plan.unchanged_prefix(s) / page_size);
    end_written = std::max(end_written, detail::pages_of(plan.num_kept(s), page_size));
  }
  changes.written = end_written > 0 ? Range{first_written, end_written} : Range{};
  changes.released = {detail::pages_of(kept, page_size), used};

  for (index_t p = 0; p < used; ++p) {
    if (p >= changes.released.first && own(p)) ++changes.num_freed;
    bool empty = true;
    for (index_t s = 0; s < plan.sets() && empty; ++s) {
      const std::span<const slot_t> slots = plan.kept(s);
      const auto first = std::lower_bound(slots.begin(), slots.end(), p * page_size);
      empty = first == slots.end() || *first / page_size != p;
    }
    if (empty && own(p)) ++changes.num_freed_in_place;
    if (p < changes.written.first || p >= changes.written.last || own(p)) continue;
    if (changes.num_need_copy < static_cast<index_t>(need_copy.size()))
      need_copy[static_cast<std::size_t>(changes.num_need_copy)] = p;
    ++changes.num_need_copy;
  }
  return changes;
}

/// A pool of page numbers `0 .. num_pages - 1` with a count of holders for each: for examples, tests and engines without one.
/// Nothing allocates after construction. One thread uses a pool at a time.
class PagePool {
 public:
  /// All pages are free. Allocates.
  [[nodiscard]] static Result<PagePool> make(index_t num_pages) {
    if (num_pages < 0 || num_pages > std::numeric_limits<page_t>::max())
      return detail::invalid("num_pages = ", num_pages, ": must not be negative and at most ",
                             std::numeric_limits<page_t>::max());
    return PagePool(num_pages);
  }

  [[nodiscard]] index_t num_pages() const noexcept { return static_cast<index_t>(ref_counts_.size()); }
  [[nodiscard]] index_t num_free() const noexcept { return num_free_; }
  /// Holders of `page`; 0 where it is free, or no page of this pool.
  [[nodiscard]] index_t ref_count(page_t page) const noexcept { return has(page) ? ref_counts_[at(page)] : 0; }

  /// A free page, now held once: the one released last, else the lowest never taken.
  [[nodiscard]] Result<page_t> take() {
    if (num_free_ == 0) return detail::error(StatusCode::out_of_capacity, "pool: none of its ", num_pages(), " pages is free");
    const page_t page = free_[static_cast<std::size_t>(--num_free_)];
    ref_counts_[at(page)] = 1;
    return page;
  }
  /// One more holder of a page that is held.
  [[nodiscard]] Status share(page_t page) {
    if (Status s = check_held(page); !s) return s;
    ++ref_counts_[at(page)];
    return {};
  }
  /// One holder less; whether that freed the page.
  [[nodiscard]] Result<bool> release(page_t page) {
    if (Status s = check_held(page); !s) return s;
    if (--ref_counts_[at(page)] > 0) return false;
    free_[static_cast<std::size_t>(num_free_++)] = page;
    return true;
  }

 private:
  explicit PagePool(index_t num_pages)
      : ref_counts_(static_cast<std::size_t>(num_pages)), free_(static_cast<std::size_t>(num_pages)), num_free_(num_pages) {
    for (std::size_t i = 0; i < free_.size(); ++i) free_[i] = static_cast<page_t>(free_.size() - 1 - i);
  }
  [[nodiscard]] static std::size_t at(page_t page) noexcept { return static_cast<std::size_t>(page); }
  [[nodiscard]] bool has(page_t page) const noexcept { return page >= 0 && page < num_pages(); }
  [[nodiscard]] Status check_held(page_t page) const {
    if (!has(page)) return detail::invalid("page = ", page, ": must be between 0 and ", num_pages() - 1);
    if (ref_counts_[at(page)] == 0) return detail::invalid("page = ", page, ": is free (released twice?)");
    return {};
  }

  std::vector<index_t> ref_counts_;
  std::vector<page_t> free_;  // a stack of num_free_
  index_t num_free_;
};

/// Copy the rows of page `from` to page `to`; nothing to do where `to` is -1.
struct PageCopy {
  page_t from = no_page;
  page_t to = no_page;
  [[nodiscard]] bool operator==(const PageCopy&) const noexcept = default;
};

/// A row in a page, and the entry of the table that leads there.
struct PagePlace {
  index_t entry = 0;
  page_t page = no_page;
  index_t offset = 0;
  PageCopy copy{};  ///< of `append`: what to copy before the row is written
};

/// The pages of one sequence, in order. Entries that are not in use are -1, always. Pages may be shared with other tables; who
/// writes first gets a copy.
///
/// Tokens are counted from the first one that was ever appended: slot `s` is token `first_token() + s`. Nothing allocates after
/// construction. A table does not know its pool: `truncate(0, pool)` it before it goes.
class PageTable {
 public:
  /// An empty table with room for `max_pages` entries. Allocates.
  [[nodiscard]] static Result<PageTable> make(index_t max_pages, index_t page_size) {
    if (max_pages < 0) return detail::invalid("max_pages = ", max_pages, ": must not be negative");
    if (page_size < 1) return detail::invalid("page_size = ", page_size, ": must be at least 1");
    return PageTable(max_pages, page_size);
  }
  PageTable(const PageTable&) = delete;  // pages are counted: see fork_from
  PageTable& operator=(const PageTable&) = delete;
  PageTable(PageTable&&) noexcept = default;
  PageTable& operator=(PageTable&&) noexcept = default;

  [[nodiscard]] index_t page_size() const noexcept { return page_size_; }
  /// Tokens in the pages.
  [[nodiscard]] index_t num_tokens() const noexcept { return tokens_; }
  /// Entries in use.
  [[nodiscard]] index_t num_pages() const noexcept { return detail::pages_of(tokens_, page_size_); }
  /// The oldest token that is still there: above 0 after `drop_front`.
  [[nodiscard]] index_t first_token() const noexcept { return first_token_; }
  /// All `max_pages` entries. Their address stays.
  [[nodiscard]] std::span<const page_t> entries() const noexcept { return entries_; }

  /// Where `token` lies.
  [[nodiscard]] Result<PagePlace> locate(index_t token) const {
    if (token < first_token_ || token - first_token_ >= tokens_)
      return detail::invalid("token = ", token, ": the table has [", first_token_, ", ", first_token_ + tokens_, ")");
    const index_t slot = token - first_token_;
    return PagePlace{slot / page_size_, entries_[at(slot / page_size_)], slot % page_size_, {}};
  }

  /// Room for one more token, and where to write it. Takes a page where the last one is full, and where it is shared: then its
  /// rows before the new one must be copied first. On an error nothing has changed.
  [[nodiscard]] Result<PagePlace> append(PagePool& pool) {
    const index_t entry = tokens_ / page_size_;
    PagePlace place{entry, no_page, tokens_ % page_size_, {}};
    if (place.offset == 0) {
      if (entry == static_cast<index_t>(entries_.size()))
        return detail::error(StatusCode::out_of_capacity, "table: all of its ", entry, " entries are in use");
      const Result<page_t> page = pool.take();
      if (!page) return page.status();
      entries_[at(entry)] = *page;
    } else {
      const Result<PageCopy> copy = make_own(entry, pool);
      if (!copy) return copy.status();
      place.copy = *copy;
    }
    place.page = entries_[at(entry)];
    ++tokens_;
    return place;
  }

  /// Exchanges a shared page for a new one, which the caller fills as the result says; a page that nobody else holds stays.
  [[nodiscard]] Result<PageCopy> make_own(index_t entry, PagePool& pool) {
    if (entry < 0 || entry >= num_pages()) return detail::invalid("entry = ", entry, ": the table uses [0, ", num_pages(), ")");
    const page_t shared = entries_[at(entry)];
    if (pool.ref_count(shared) == 1) return PageCopy{};
    if (Status s = check_held(entry, entry + 1, pool); !s) return s;
    const Result<page_t> page = pool.take();
    if (!page) return page.status();
    static_cast<void>(pool.release(shared));
    entries_[at(entry)] = *page;
    return PageCopy{shared, *page};
  }

  /// This empty table becomes a fork of `other`: all pages shared.
  [[nodiscard]] Status fork_from(const PageTable& other, PagePool& pool) {
    if (tokens_ != 0) return detail::invalid("fork: this table has ", tokens_, " tokens: must be empty");
    if (page_size_ != other.page_size_)
      return detail::invalid("fork: page_size = ", other.page_size_, ": must be ", page_size_);
    if (other.num_pages() > static_cast<index_t>(entries_.size()))
      return detail::error(StatusCode::out_of_capacity, "fork: ", other.num_pages(), " pages: this table has ", entries_.size(),
                           " entries");
    if (Status s = other.check_held(0, other.num_pages(), pool); !s) return s;
    for (index_t p = 0; p < other.num_pages(); ++p) {
      entries_[at(p)] = other.entries_[at(p)];
      static_cast<void>(pool.share(entries_[at(p)]));
    }
    tokens_ = other.tokens_;
    first_token_ = other.first_token_;
    return {};
  }

  /// Keeps the first `count` tokens (after the moves of a plan: what it kept) and releases the pages behind them. Returns how
  /// many pages are free now: those that others hold are not.
  [[nodiscard]] Result<index_t> truncate(index_t count, PagePool& pool) {
    if (count < 0 || count > tokens_) return detail::invalid("count = ", count, ": must be between 0 and ", tokens_);
    const index_t first = detail::pages_of(count, page_size_);
    const Result<index_t> freed = release(first, num_pages(), pool);
    if (!freed) return freed;
    std::fill(entries_.begin() + first, entries_.end(), no_page);
    tokens_ = count;
    return freed;
  }

  /// Releases the first `count` pages without moving a row: a window that slides by whole pages. Tokens keep their numbers.
  /// Returns how many pages are free now.
  [[nodiscard]] Result<index_t> drop_front(index_t count, PagePool& pool) {
    if (count < 0 || count > tokens_ / page_size_)
      return detail::invalid("count = ", count, ": must be between 0 and the ", tokens_ / page_size_, " full pages");
    const Result<index_t> freed = release(0, count, pool);
    if (!freed) return freed;
    std::move(entries_.begin() + count, entries_.end(), entries_.begin());
    std::fill(entries_.end() - count, entries_.end(), no_page);
    tokens_ -= count * page_size_;
    first_token_ += count * page_size_;
    return freed;
  }

 private:
  PageTable(index_t max_pages, index_t page_size)
      : entries_(static_cast<std::size_t>(max_pages), no_page), page_size_(page_size) {}
  [[nodiscard]] static std::size_t at(index_t entry) noexcept { return static_cast<std::size_t>(entry); }

  /// A table and a pool that do not belong together are found out before anything changes.
  [[nodiscard]] Status check_held(index_t first, index_t last, const PagePool& pool) const {
    for (index_t p = first; p < last; ++p)
      if (pool.ref_count(entries_[at(p)]) == 0)
        return detail::invalid("table[", p, "] = ", entries_[at(p)], ": is no page that this pool has given out");
    return {};
  }
  [[nodiscard]] Result<index_t> release(index_t first, index_t last, PagePool& pool) const {
    if (Status s = check_held(first, last, pool); !s) return s;
    index_t freed = 0;
    for (index_t p = first; p < last; ++p) {
      const Result<bool> free = pool.release(entries_[at(p)]);
      freed += free && *free ? 1 : 0;
    }
    return freed;
  }

  std::vector<page_t> entries_;
  index_t page_size_;
  index_t tokens_ = 0;
  index_t first_token_ = 0;
};

}  // namespace beaconkv::inline v0
