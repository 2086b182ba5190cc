#pragma once

#include <string>
#include <string_view>

namespace ringdl {

/// A string of JSON. UTF-8 stays as it is.
std::string quoted(std::string_view text);

}  // namespace ringdl
