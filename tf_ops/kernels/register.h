// What the files of all ops need of TensorFlow, and the registration of their kernels.
#pragma once

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace keras_hvd {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

}  // namespace keras_hvd

// A kernel for CPUs and GPUs. The further arguments name the tensors that stay in the
// host's memory: .HostMemory("splits").
#define KERAS_HVD_REGISTER(OP, KERNEL, ...)                                 \
  REGISTER_KERNEL_BUILDER(Name(OP).Device(tensorflow::DEVICE_CPU), KERNEL); \
  REGISTER_KERNEL_BUILDER(Name(OP).Device(tensorflow::DEVICE_GPU) __VA_ARGS__, KERNEL)
