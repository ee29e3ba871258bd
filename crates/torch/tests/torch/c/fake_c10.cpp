// Stand-in for libc10.so.
#include "fake_c10.h"

namespace c10 {

static std::atomic<long> alive{0};

Error::Error(SourceLocation location, std::string text)
    : text_(std::move(text)),
      context_(3, "context"),
      witness_(std::make_shared<int>(0)),
      where_(std::string(location.function) + " in " + location.file + ":" + std::to_string(location.line)) {
  alive++;
}

Error::~Error() { alive--; }

const char* Error::what() const noexcept { return text_.c_str(); }

long errors_alive() { return alive; }

void detail::torchCheckFail(const char* function, const char* file, uint32_t line, const char* text) {
  throw Error({function, file, line}, text);
}

}  // namespace c10
