// beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
#pragma once

/// \file
/// Pieces of an HTML page as text. Whatever comes from outside goes through `escaped`.

#include <algorithm>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace beaconkv::lab {

[[nodiscard]] inline std::string joined(std::initializer_list<std::string_view> parts) {
  std::string out;
  for (const std::string_view part : parts) out.append(part);
  return out;
}

/// Text as HTML and as the value of an attribute. Control characters, which no page may hold, become spaces.
[[nodiscard]] inline std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) switch (c) {
      case '&':
        out.append("&amp;");
        break;
      case '<':
        out.append("&lt;");
        break;
      case '>':
        out.append("&gt;");
        break;
      case '"':
        out.append("&quot;");
        break;
      case '\'':
        out.append("&#39;");
        break;
      default:
        out.push_back(static_cast<unsigned char>(c) < 0x20 || c == 0x7F ? ' ' : c);
    }
  return out;
}

/// The same as HTML that may go on in a new line within long names.
[[nodiscard]] inline std::string breakable(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const std::size_t at = std::min(text.find_first_of("_:,/="), text.size() - 1) + 1;
    out.append(escaped(text.substr(0, at))).append(at < text.size() ? "<wbr>" : "");
    text.remove_prefix(at);
  }
  return out;
}

/// `<tag attributes>content</tag>`; the content is HTML already. `attributes` begin with a space, or are empty.
[[nodiscard]] inline std::string element(std::string_view tag, std::string_view attributes, std::string_view content) {
  return joined({"<", tag, attributes, ">", content, "</", tag, ">"});
}

/// One cell of a table: plain text.
struct Cell {
  std::string text{};
  std::string small{};  ///< behind it, less prominent
  bool strong = false;
};

/// A table whose first column names the rows. Numbers stand to the right.
struct Table {
  std::vector<std::string> heads{};
  std::vector<std::vector<Cell>> rows{};
};

/// The table in a box of its own that scrolls where it is wider than the page.
[[nodiscard]] inline std::string html_of(const Table& table) {
  std::string head;
  for (const std::string& text : table.heads) head.append(element("th", " scope=\"col\"", escaped(text)));
  std::string body;
  for (const std::vector<Cell>& row : table.rows) {
    std::string cells;
    for (std::size_t i = 0; i < row.size(); ++i) {
      std::string content = i == 0 ? breakable(row[i].text) : escaped(row[i].text);
      if (row[i].strong) content = element("b", "", content);
      if (!row[i].small.empty()) content.append(" ").append(element("small", "", escaped(row[i].small)));
      cells.append(i == 0 ? element("th", " scope=\"row\"", content) : element("td", "", content));
    }
    body.append(element("tr", "", cells)).append("\n");
  }
  return joined({"<div class=\"box\" role=\"region\" aria-label=\"Table\" tabindex=\"0\"><table><thead><tr>", head,
                 "</tr></thead><tbody>\n", body, "</tbody></table></div>\n"});
}

/// The numbers beside a plot.
[[nodiscard]] inline std::string details(std::string_view summary, std::string_view content) {
  return joined({"<details><summary>", escaped(summary), "</summary>\n", content, "</details>\n"});
}

}  // namespace beaconkv::lab
