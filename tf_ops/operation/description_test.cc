// The texts for people about a request.
#include "tf_ops/operation/description.h"

#include <gtest/gtest.h>

namespace keras_hvd {
namespace {

TEST(DescriptionTest, NothingInANameActsOnATerminalOrEndsTheLine) {
  EXPECT_EQ(Quoted("grad/\x1b[31mw\n\x7f"), "'grad/\\x1b[31mw\\x0a\\x7f'");
  // In UTF-8: the control that begins a sequence, and letters of the same first byte.
  EXPECT_EQ(Quoted("\xc2\x9b"
                   "31m"),
            "'\\x9b31m'");
  EXPECT_EQ(Quoted("\xc2\xb5, \xc3\xa4, \xc2"), "'\xc2\xb5, \xc3\xa4, \xc2'");
}

TEST(DescriptionTest, ALongNameIsShownByItsEnds) {
  const std::string name = "first" + std::string(1000, '\n') + "last";
  const std::string quoted = Quoted(name);
  EXPECT_EQ(quoted.rfind("'first\\x0a", 0), 0);
  EXPECT_NE(quoted.find("\\x0alast' (1009 bytes)"), std::string::npos);
  EXPECT_LT(quoted.size(), 2100);
}

}  // namespace
}  // namespace keras_hvd
