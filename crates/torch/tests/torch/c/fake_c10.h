// PyTorch's exceptions as far as the allocator needs them: same names and signatures, so that the mangled symbols are
// the same.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

namespace c10 {

struct SourceLocation {
  const char* function;
  const char* file;
  uint32_t line;
};

class Error : public std::exception {
  std::string text_;
  std::vector<std::string> context_;
  std::shared_ptr<int> witness_;
  std::atomic<std::string*> lazy_{nullptr};
  std::string where_;
  const void* caller_ = nullptr;

 public:
  Error(SourceLocation location, std::string text);
  ~Error() override;
  const char* what() const noexcept override;
  const std::string& where() const { return where_; }
};

class OutOfMemoryError : public Error {
  using Error::Error;
};

// The number of existing errors.
long errors_alive();

namespace detail {
[[noreturn]] void torchCheckFail(const char* function, const char* file, uint32_t line, const char* text);
}

}  // namespace c10
