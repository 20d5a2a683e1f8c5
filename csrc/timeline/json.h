// Pieces of JSON, appended to a string.
#pragma once

#include <charconv>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

namespace multicomm::timeline {

class Json {
 public:
  const std::string& text() const { return text_; }
  void clear() { text_.clear(); }
  Json& raw(std::string_view text) {
    text_.append(text);
    return *this;
  }
  template <typename Number>
  Json& number(Number value) {
    char digits[24];
    const auto end = std::to_chars(digits, digits + sizeof(digits), value).ptr;
    text_.append(digits, static_cast<size_t>(end - digits));
    return *this;
  }
  // Nanoseconds (>= 0) as the microseconds that the trace format counts in.
  Json& microseconds(int64_t nanoseconds) {
    number(nanoseconds / 1000);
    const auto part = static_cast<int>(nanoseconds % 1000);
    const char digits[] = {'.', static_cast<char>('0' + part / 100), static_cast<char>('0' + part / 10 % 10),
                           static_cast<char>('0' + part % 10)};
    text_.append(digits, sizeof(digits));
    return *this;
  }
  // At most kLongest bytes of it, so that an event has a bound.
  Json& string(std::string_view text) {
    size_t length = text.size();
    if (length > kLongest)
      for (length = kLongest; length > 0 && (static_cast<unsigned char>(text[length]) & 0xc0) == 0x80;) --length;
    text_.push_back('"');
    for (const char c : text.substr(0, length)) {
      if (c == '"' || c == '\\') {
        text_.push_back('\\');
        text_.push_back(c);
      } else if (static_cast<unsigned char>(c) < 0x20) {
        char escaped[8];
        std::snprintf(escaped, sizeof(escaped), "\\u%04x", static_cast<unsigned>(static_cast<unsigned char>(c)));
        text_.append(escaped);
      } else {
        text_.push_back(c);
      }
    }
    text_.push_back('"');
    return *this;
  }

 private:
  static constexpr size_t kLongest = 300;
  std::string text_;
};

}  // namespace multicomm::timeline
