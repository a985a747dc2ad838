// Autograd computes with tensors of a fake GPU if CUDA has hooks and a device guard: one device with
// one stream, and nothing to wait for.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using c10::Device;
using c10::Stream;

namespace at {
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool isBuilt() const override { return true; }
  long versionRuntimeCuDNN() const override { return 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};
// In the place of those of torch built for CUDA, if this library is loaded first.
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks)
} // namespace at

namespace {
const Device device(c10::DeviceType::CUDA, 0);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  Device getDevice() const override { return device; }
  Device exchangeDevice(Device) const override { return device; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream) const noexcept override { return getStream(device); }
  void record(void**, const Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
};
} // namespace

extern "C" void set_guard() { // after torch has set its own
  c10::impl::DeviceGuardImplRegistrar(c10::DeviceType::CUDA, new Guard());
}
