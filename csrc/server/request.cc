#include "server/request.h"

#include <cstring>

namespace ringdl {

Visit::Action action_of(const Request& request) {
  return [request](const Shard& shard, size_t begin, std::byte* data, size_t count, bool is_last) {
    const DType dtype = shard.shape().dtype;
    switch (request.what) {
      case Request::What::kPush:
        shard.update(request.update, begin, data, count, is_last);
        break;
      case Request::What::kFetch:
        std::memcpy(data, shard.values(begin), count * item_bytes(dtype));
        break;
      case Request::What::kPull:
        pull_together(dtype, request.share, shard.values(begin), data, count);
        break;
      case Request::What::kFill:
        shard.fill(begin, data, count, is_last);
        break;
      default:
        break;
    }
  };
}

}  // namespace ringdl
