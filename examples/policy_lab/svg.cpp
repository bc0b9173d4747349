// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#include "policy_lab/svg.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "policy_lab/html.hpp"

namespace beaconkv::lab {
namespace {

constexpr double left = 44;
constexpr double top = 26;
constexpr double bottom = 40;
constexpr double label_gap = 14;

[[nodiscard]] double scaled(Scale scale, double value) {
  switch (scale) {
    case Scale::logarithmic:
      return std::log10(value);
    case Scale::nines:
      return -std::log10(1 - value);
    case Scale::linear:
      break;
  }
  return value;
}

[[nodiscard]] std::string text_at(double x, double y, std::string_view attributes, std::string_view text) {
  return joined({"<text x=\"", coordinate(x), "\" y=\"", coordinate(y), "\"", attributes, ">", escaped(text), "</text>\n"});
}

[[nodiscard]] std::string line_between(double x1, double y1, double x2, double y2, std::string_view style) {
  return joined({"<path class=\"", style, "\" d=\"M", coordinate(x1), " ", coordinate(y1), "L", coordinate(x2), " ",
                 coordinate(y2), "\"/>\n"});
}

}  // namespace

std::string fixed(double value, int digits) {
  if (!std::isfinite(value)) return "-";
  char text[400];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

std::string coordinate(double value) {
  if (!std::isfinite(value)) return "0";
  std::string text = fixed(value, 2);
  while (text.back() == '0') text.pop_back();
  if (text.back() == '.') text.pop_back();
  return text == "-0" ? "0" : text;
}

std::string grouped(std::int64_t value) {
  std::string digits = std::to_string(value);
  for (std::size_t at = digits.size(); at > 3 + (value < 0 ? 1U : 0U);) digits.insert(at -= 3, "\u2009");
  return digits;
}

std::string shortened(const std::string& text, std::size_t most) {
  std::vector<std::size_t> begins;  // of characters
  for (std::size_t i = 0; i < text.size(); ++i)
    if ((static_cast<unsigned char>(text[i]) & 0xC0U) != 0x80U) begins.push_back(i);
  if (begins.size() <= most || most == 0) return text;
  const std::size_t behind = most * 2 / 5;
  const std::string_view all(text);
  return joined({all.substr(0, begins[most - 1 - behind]), "\u2026",
                 behind > 0 ? all.substr(begins[begins.size() - behind]) : std::string_view()});
}

double Axis::along(double value) const {
  const double at = scaled(scale, std::clamp(value, low, high));
  const double from = scaled(scale, low);
  const double to = scaled(scale, high);
  return to > from ? (at - from) / (to - from) : 0.5;
}

std::vector<double> linear_ticks(double low, double high, int most) {
  if (!(high > low) || !std::isfinite(high - low) || most < 1) return {low};
  const double rough = (high - low) / most;
  const double power = std::pow(10, std::floor(std::log10(rough)));
  double step = 10 * power;
  for (const double factor : {5.0, 2.0, 1.0})
    if (factor * power >= rough * (1 - 1e-9)) step = factor * power;
  std::vector<double> ticks;
  const double first = std::ceil(low / step - 1e-9);
  for (double i = first; i * step <= high + 1e-9 * step; ++i) ticks.push_back(i == 0 ? 0 : i * step);
  return ticks;
}

std::vector<double> logarithmic_ticks(double low, double high, std::size_t most) {
  std::vector<double> ticks;
  if (!(low > 0) || !(high >= low) || !std::isfinite(high)) return ticks;
  for (const std::initializer_list<double> factors : {std::initializer_list<double>{1, 2, 3, 5, 7}, {1, 2, 5}, {1}}) {
    ticks.clear();
    for (double exponent = std::floor(std::log10(low)); exponent <= std::ceil(std::log10(high)); ++exponent)
      for (const double factor : factors) {
        const double value = factor * std::pow(10, exponent);
        if (value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9)) ticks.push_back(value);
      }
    if (ticks.size() <= most) break;
  }
  return ticks;
}

std::vector<double> spread(const std::vector<double>& wanted, double gap, double low, double high) {
  std::vector<std::size_t> order(wanted.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return wanted[a] < wanted[b]; });
  // Labels that touch become a block, which sits where its members would like to be on average.
  struct Block {
    double sum = 0;  // of the wanted places, each less its offset in the block
    double count = 0;
    double first = 0;
  };
  std::vector<Block> blocks;
  const auto settle = [&](Block& block) {
    block.first = std::min(block.sum / block.count, high - (block.count - 1) * gap);
    block.first = std::max(block.first, low);
  };
  for (const std::size_t i : order) {
    blocks.push_back({wanted[i], 1, 0});
    settle(blocks.back());
    while (blocks.size() > 1) {
      Block& before = blocks[blocks.size() - 2];
      const Block& last = blocks.back();
      if (before.first + before.count * gap <= last.first) break;
      before.sum += last.sum - before.count * gap * last.count;
      before.count += last.count;
      blocks.pop_back();
      settle(blocks.back());
    }
  }
  std::vector<double> placed(wanted.size());
  std::size_t next = 0;
  for (const Block& block : blocks)
    for (double i = 0; i < block.count; ++i) placed[order[next++]] = block.first + i * gap;
  return placed;
}

Plot::Plot(Axis x, Axis y, double height, double label_width)
    : x_(std::move(x)), y_(std::move(y)), height_(height), right_(width - 10 - label_width) {}

double Plot::across(double x) const { return left + x_.along(x) * (right_ - left); }
double Plot::up(double y) const { return height_ - bottom - y_.along(y) * (height_ - bottom - top); }

void Plot::line(const std::vector<Point>& points, std::string_view style, bool dashed, double shift) {
  if (points.empty()) return;
  std::string path;
  for (const Point& p : points)
    path.append(path.empty() ? "M" : "L").append(coordinate(across(p.x) + shift)).append(" ").append(coordinate(up(p.y)));
  curves_.append(joined({"<path class=\"curve ", dashed ? "dashed " : "", style, "\" d=\"", path, "\"/>\n"}));
}

void Plot::whisker(double x, double low, double high, std::string_view style, double shift) {
  const double at = across(x) + shift;
  curves_.append(line_between(at, up(low), at, up(high), joined({"whisker ", style})));
}

void Plot::mark(Point at, std::string_view style, std::string_view title, double shift) {
  const std::string x = coordinate(across(at.x) + shift);
  const std::string y = coordinate(up(at.y));
  marks_.append(joined({"<g class=\"", style, "\"><title>", escaped(title), "</title><circle class=\"near\" cx=\"", x,
                        "\" cy=\"", y, "\" r=\"9\"/><circle class=\"dot\" cx=\"", x, "\" cy=\"", y, "\" r=\"3\"/></g>\n"}));
}

void Plot::label(Point end, const std::string& text, std::string_view style) {
  labels_.push_back({end, text, std::string(style)});
}

std::string Plot::svg(std::string_view description) const {
  std::string out = joined({"<svg class=\"plot\" viewBox=\"0 0 ", coordinate(width), " ", coordinate(height_),
                            "\" role=\"img\" aria-label=\"", escaped(description), "\">\n"});
  for (const Tick& tick : y_.ticks) {
    out.append(line_between(left, up(tick.value), right_, up(tick.value), "grid"));
    out.append(text_at(left - 7, up(tick.value) + 4.5, " class=\"tick end\"", tick.label));
  }
  for (const Tick& tick : x_.ticks) {
    out.append(line_between(across(tick.value), height_ - bottom, across(tick.value), height_ - bottom + 4, "axis"));
    out.append(text_at(across(tick.value), height_ - bottom + 18, " class=\"tick middle\"", tick.label));
  }
  out.append(line_between(left, height_ - bottom, right_, height_ - bottom, "axis"));
  out.append(text_at(2, 13, " class=\"name\"", y_.title));
  out.append(text_at(right_, height_ - 5, " class=\"name end\"", x_.title));
  out.append(curves_).append(marks_);

  std::vector<double> wanted;
  for (const Label& label : labels_) wanted.push_back(up(label.end.y));
  const std::vector<double> places = spread(wanted, label_gap, top, height_ - bottom);
  for (std::size_t i = 0; i < labels_.size(); ++i) {
    const double from = across(labels_[i].end.x) + 5;
    out.append(line_between(from, wanted[i], right_ + 14, places[i], joined({"leader ", labels_[i].style})));
    out.append(joined({"<g class=\"", labels_[i].style, "\"><title>", escaped(labels_[i].text), "</title>",
                       text_at(right_ + 18, places[i] + 4.5, " class=\"label\"", shortened(labels_[i].text, 18)), "</g>\n"}));
  }
  return out.append("</svg>\n");
}

}  // namespace beaconkv::lab
