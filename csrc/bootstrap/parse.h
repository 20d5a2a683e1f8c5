// Reads what another process has written. Nothing of it is taken on trust: what is malformed ends in an error that
// says so, before anything is allocated or indexed by it.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace multicomm::bootstrap {

// For error texts: bounded, and printable whatever the bytes are.
inline std::string quoted(std::string_view text) {
  constexpr size_t kShown = 60;
  std::string shown(text.substr(0, kShown));
  std::replace_if(shown.begin(), shown.end(), [](unsigned char c) { return c < ' ' || c > '~'; }, '?');
  return '\'' + shown + (text.size() > kShown ? "...'" : "'");
}

// The whole of `text` as a decimal number from `low` to `high`. Throws std::runtime_error.
inline int64_t parse_number(std::string_view text, int64_t low, int64_t high, const std::string& what) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < low || value > high) {
    throw std::runtime_error(what + " is " + quoted(text) + ", not a number from " + std::to_string(low) + " to " +
                             std::to_string(high));
  }
  return value;
}

// Letters, digits, '.', '-', '_': what may stand in a name that PMIx, paths and socket addresses are made of.
inline bool is_plain(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '-' || c == '_';
}
inline bool is_plain_name(std::string_view text, size_t longest) {
  return !text.empty() && text.size() <= longest && std::all_of(text.begin(), text.end(), is_plain);
}

// Takes the text up to the next `end` off the front of `rest`. Throws std::runtime_error where there is none.
inline std::string_view take_field(std::string_view& rest, char end, const std::string& what) {
  const size_t at = rest.find(end);
  if (at == std::string_view::npos) throw std::runtime_error(what + " ends too early");
  const std::string_view field = rest.substr(0, at);
  rest.remove_prefix(at + 1);
  return field;
}

}  // namespace multicomm::bootstrap
