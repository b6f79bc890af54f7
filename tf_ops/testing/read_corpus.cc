// Gives a fuzzer's function all inputs that an earlier fuzzer has kept: the files of a
// tar archive.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

// A file has a header of one block, and its last block is filled up.
constexpr size_t kBlock = 512;
constexpr size_t kSizeAt = 124;
constexpr size_t kSizeDigits = 11;

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  std::ifstream archive(argv[1], std::ios::binary);
  int inputs = 0;
  // Blocks of zeros end an archive that is whole.
  for (char header[kBlock]; archive.read(header, kBlock) && header[0] != '\0';) {
    const size_t size =
        std::stoul(std::string(header + kSizeAt, kSizeDigits), nullptr, 8);
    // Just as long as the input, so that a sanitizer sees reads behind it.
    std::vector<char> bytes(size);
    archive.read(bytes.data(), bytes.size());
    archive.ignore((kBlock - size % kBlock) % kBlock);
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()),
                           bytes.size());
    ++inputs;
  }
  printf("%d inputs\n", inputs);
  return archive && inputs > 0 ? 0 : 1;
}
