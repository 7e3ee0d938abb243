// Error texts from parts, with nothing but std::string: a stream brings locales along, and two copies of a
// C++ library in one process (one of them static) do not share those.
#pragma once

#include <string>
#include <string_view>
#include <type_traits>

namespace hicache {

template <typename Part>
void append_text(std::string& text, const Part& part) {
  if constexpr (std::is_integral_v<Part>)
    text += std::to_string(part);
  else
    text += std::string_view(part);
}

template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::string text;
  (append_text(text, parts), ...);
  return text;
}

}  // namespace hicache
