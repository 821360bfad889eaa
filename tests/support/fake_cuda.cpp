// Lets a PyTorch without CUDA build autograd graphs of fake CUDA tensors: a device guard and hooks for one GPU that does nothing.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace at {
namespace {

const Device the_gpu(DeviceType::CUDA, 0);

struct Hooks : public CUDAHooksInterface {
  explicit Hooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};

// Backward asks for streams and events between operators; there is one stream, and nothing to wait for.
struct Guard : public c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return the_gpu; }
  Device exchangeDevice(Device) const override { return the_gpu; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, the_gpu); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, the_gpu); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, the_gpu); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};

using CUDAHooks = Hooks;
REGISTER_CUDA_HOOKS(CUDAHooks);
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

} // namespace
} // namespace at
