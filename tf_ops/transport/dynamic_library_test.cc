// Libraries that are opened at run time, and the errors of those that cannot be.
#include "tf_ops/transport/dynamic_library.h"

#include <gtest/gtest.h>

#include <fstream>

namespace keras_hvd {
namespace {

TEST(DynamicLibraryTest, FindsFunctions) {
  DynamicLibrary library;
  ASSERT_EQ(DynamicLibrary::Open("libm.so.6", "missing", &library).message, "");
  EXPECT_EQ(library.path().front(), '/');
  double (*cosine)(double) = nullptr;
  ASSERT_EQ(library.Find("cos", &cosine).message, "");
  EXPECT_EQ(cosine(0), 1);
}

TEST(DynamicLibraryTest, NamesTheFunctionThatIsNotThere) {
  DynamicLibrary library;
  ASSERT_EQ(DynamicLibrary::Open("libm.so.6", "missing", &library).message, "");
  void (*function)() = nullptr;
  EXPECT_EQ(library.Find("cosinus", &function).message,
            "there is no function cosinus in " + library.path());
  EXPECT_EQ(function, nullptr);
}

TEST(DynamicLibraryTest, SaysWhatItIsToldOfAMissingFile) {
  DynamicLibrary library;
  for (const char* name : {"libkeras_hvd_none.so.1", "/nowhere/libm.so.6"}) {
    EXPECT_EQ(DynamicLibrary::Open(name, "there is none", &library).message,
              "there is none");
  }
}

TEST(DynamicLibraryTest, SaysWhatIsWrongWithAFile) {
  const std::string path = testing::TempDir() + "/text.so";
  std::ofstream(path) << std::string(10000, 'x');
  DynamicLibrary library;
  EXPECT_EQ(DynamicLibrary::Open(path, "there is none", &library).message,
            path + " cannot be opened: " + path + ": invalid ELF header");
}

}  // namespace
}  // namespace keras_hvd
