// The driver, and the errors where it cannot be used.
#include "tf_ops/cuda/driver.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include "tf_ops/testing/gpu/stand_in.h"

namespace keras_hvd::cuda {
namespace {

class DriverTest : public testing::Test {
 protected:
  DriverTest() { control_->Reset(1); }
  ~DriverTest() override {
    EXPECT_EQ(control_->Violations(), std::vector<std::string>());
  }

  Status Open(const std::string& path = stand_in::kCudaLibrary) {
    return Driver::Open(path, &driver_);
  }

  const stand_in::StandIn control_;
  std::shared_ptr<const Driver> driver_;
};

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_F(DriverTest, SaysWhatItIs) {
  ASSERT_EQ(Open().message, "");
  EXPECT_EQ(driver_->text().rfind("CUDA 12.4 (", 0), 0u) << driver_->text();
  EXPECT_TRUE(Contains(driver_->text(), "libcuda.so.1), 4 devices"));
  control_->SetDevices(1);
  ASSERT_EQ(Open().message, "");
  EXPECT_TRUE(Contains(driver_->text(), "), 1 device"));
}

TEST_F(DriverTest, IsNotThere) {
  EXPECT_EQ(Open("/nowhere/libcuda.so.1").message,
            "there is no CUDA driver in /nowhere/libcuda.so.1");
  EXPECT_EQ(driver_, nullptr);
}

TEST_F(DriverTest, LacksAFunction) {
  const Status status = Open(stand_in::kIncompleteCudaLibrary);
  EXPECT_EQ(status.message.rfind("there is no function cuEventQuery in ", 0), 0u);
  EXPECT_TRUE(Contains(status.message, "libcuda_incomplete.so.1"));
  EXPECT_EQ(driver_, nullptr);
}

TEST_F(DriverTest, FindsNoDevice) {
  control_->SetDevices(0);
  Status status = Open();
  EXPECT_TRUE(Contains(status.message,
                       "CUDA failed in cuInit: CUDA_ERROR_NO_DEVICE, no CUDA-capable "
                       "device is detected"))
      << status.message;
  EXPECT_FALSE(Contains(status.message, "CUDA_VISIBLE_DEVICES"));
  setenv("CUDA_VISIBLE_DEVICES", "-1", 1);
  status = Open();
  unsetenv("CUDA_VISIBLE_DEVICES");
  EXPECT_TRUE(Contains(status.message,
                       "CUDA_VISIBLE_DEVICES, which hides all others, "
                       "is \"-1\""))
      << status.message;
  EXPECT_EQ(driver_, nullptr);
}

TEST_F(DriverTest, NamesTheFunctionThatFails) {
  for (const char* function : {"cuInit", "cuDriverGetVersion", "cuDeviceGetCount"}) {
    control_->Inject({function, 999});
    const Status status = Open();
    EXPECT_TRUE(Contains(status.message, "CUDA failed in " + std::string(function) +
                                             ": CUDA_ERROR_UNKNOWN, unknown error"))
        << status.message;
    EXPECT_EQ(driver_, nullptr);
  }
}

TEST_F(DriverTest, SaysTheNumberOfAnErrorWithoutName) {
  ASSERT_EQ(Open().message, "");
  EXPECT_EQ(driver_->Check(Result{12345}, "cuInit").message,
            "CUDA failed in cuInit: error 12345");
  EXPECT_TRUE(driver_->Check(Result::kSuccess, "cuInit").ok());
}

}  // namespace
}  // namespace keras_hvd::cuda
