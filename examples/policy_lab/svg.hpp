// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Plots as inline SVG. Colours and fonts are the page's: styles are class names.

#include <string>
#include <string_view>
#include <vector>

#include "beaconkv/types.hpp"

namespace beaconkv::lab {

/// A number with so many decimals; "-" where it is not finite.
[[nodiscard]] std::string fixed(double value, int digits);
/// A coordinate: at most two decimals, no zeros behind them.
[[nodiscard]] std::string coordinate(double value);
/// `277 344`, with thin spaces.
[[nodiscard]] std::string grouped(std::int64_t value);
/// At most `most` characters (not bytes) of a UTF-8 text: an ellipsis in the middle where it is longer, since settings differ
/// at their ends.
[[nodiscard]] std::string shortened(const std::string& text, std::size_t most);

enum class Scale {
  linear,
  logarithmic,
  nines,  ///< of a quantile: 0.9, 0.99 and 0.999 are equally far apart
};

struct Tick {
  double value = 0;
  std::string label{};
};

struct Axis {
  Scale scale = Scale::linear;
  double low = 0;
  double high = 1;
  std::vector<Tick> ticks{};
  std::string title{};

  /// Where a value lies between `low` (0) and `high` (1). Values outside lie on the ends.
  [[nodiscard]] double along(double value) const;
};

/// Round values from `low` to `high`, at most `most + 1`: multiples of 1, 2 or 5 times a power of ten.
[[nodiscard]] std::vector<double> linear_ticks(double low, double high, int most);
/// From `low` to `high` (positive): 1, 2, 3, 5 and 7 times powers of ten; 1, 2 and 5 times where these were more than `most`;
/// powers of ten where these were.
[[nodiscard]] std::vector<double> logarithmic_ticks(double low, double high, std::size_t most);

/// Places for labels that want to be at `wanted` (any order), at least `gap` apart and within `low` to `high` as far as there
/// is room. The order is kept; of equals, the first lies lower.
[[nodiscard]] std::vector<double> spread(const std::vector<double>& wanted, double gap, double low, double high);

struct Point {
  double x = 0;
  double y = 0;
};

/// One pair of axes with curves. All units are those of the axes, but shifts, which are pixels.
class Plot {
 public:
  static constexpr double width = 460;

  /// `label_width` is the room on the right, for labels.
  Plot(Axis x, Axis y, double height, double label_width);

  /// A curve; `style` is a class.
  void line(const std::vector<Point>& points, std::string_view style, bool dashed = false, double shift = 0);
  void whisker(double x, double low, double high, std::string_view style, double shift = 0);
  /// A dot; `title` is shown on hover.
  void mark(Point at, std::string_view style, std::string_view title, double shift = 0);
  /// A name on the right of the plot, at the end of a curve.
  void label(Point end, const std::string& text, std::string_view style);

  /// The picture; `description` is for those who do not see it.
  [[nodiscard]] std::string svg(std::string_view description) const;

 private:
  struct Label {
    Point end;
    std::string text;
    std::string style;
  };
  [[nodiscard]] double across(double x) const;
  [[nodiscard]] double up(double y) const;

  Axis x_;
  Axis y_;
  double height_;
  double right_;  // of the plotting area
  std::string curves_{};
  std::string marks_{};
  std::vector<Label> labels_{};
};

}  // namespace beaconkv::lab
