// Pieces of JSON, one after the other.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <system_error>

namespace multicomm::timeline {

// The beginning of a text, of at most so many bytes and of whole UTF-8 characters.
inline std::string_view beginning(std::string_view text, size_t most) {
  if (text.size() <= most) return text;
  while (most > 0 && (static_cast<unsigned char>(text[most]) & 0xc0) == 0x80) --most;
  return text.substr(0, most);
}

// One object at a time, in a buffer that has room for it: what may be long is cut.
class Json {
 public:
  std::string_view text() const { return {text_, static_cast<size_t>(at_ - text_)}; }
  void clear() { at_ = text_; }
  Json& raw(std::string_view text) {
    const size_t length = std::min(text.size(), room());
    std::memcpy(at_, text.data(), length);
    at_ += length;
    return *this;
  }
  template <typename Number>
  Json& number(Number value) {
    if (const auto [end, error] = std::to_chars(at_, text_ + sizeof(text_), value); error == std::errc()) at_ = end;
    return *this;
  }
  // Nanoseconds (>= 0) as the microseconds that the trace format counts in.
  Json& microseconds(int64_t nanoseconds) {
    number(nanoseconds / 1000);
    const auto part = static_cast<int>(nanoseconds % 1000);
    const char digits[] = {'.', static_cast<char>('0' + part / 100), static_cast<char>('0' + part / 10 % 10),
                           static_cast<char>('0' + part % 10)};
    return raw({digits, sizeof(digits)});
  }
  Json& string(std::string_view text) {
    raw("\"");
    for (const char c : beginning(text, kLongest)) {
      constexpr const char* kDigits = "0123456789abcdef";
      const auto code = static_cast<unsigned char>(c);
      const char escaped[] = {'\\', 'u', '0', '0', kDigits[code >> 4], kDigits[code & 15]};
      if (code < 0x20) raw({escaped, sizeof(escaped)});
      else if (c == '"' || c == '\\') raw("\\").raw({&c, 1});
      else raw({&c, 1});
    }
    return raw("\"");
  }

 private:
  // An object has at most three strings, whose characters may take six bytes each, and 1 KiB of other things.
  static constexpr size_t kLongest = 300;
  size_t room() const { return static_cast<size_t>(text_ + sizeof(text_) - at_); }
  char text_[8192];
  char* at_ = text_;
};

}  // namespace multicomm::timeline
