// A simulated accelerator for tests: torch's device type PrivateUse1 with four devices, whose memory and kernels are the
// CPU's. Kernels run at once, so numbers always come out right; a vector clock of each stream finds what was not ordered.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 4;
constexpr c10::StreamId kHost = -1;

thread_local c10::DeviceIndex current = 0;
thread_local std::map<int, c10::StreamId> current_streams;  // device -> stream, per thread as on CUDA

// ---- Vector clocks. A stream's clock holds, for each stream, the last of its kernels that it has waited for; a thread's
// clock holds the kernels that it has waited for, and so has all that it queues afterwards.

using Clock = std::map<c10::StreamId, long>;

struct Memory {
  Clock written, read;
  size_t bytes;
  c10::StreamId owner;                  // the stream that was current at the allocation
  std::vector<c10::StreamId> recorded;  // by record_stream
  std::string last;                     // the last op that touched it
};

std::mutex lock;  // of all that follows
std::map<c10::StreamId, Clock> clocks;
std::map<void*, Clock> events;
std::map<void*, Memory> memory;
std::vector<std::string> races;
std::atomic<int64_t> waits{0};  // how often the host has waited for a device
long kernels = 0;
c10::StreamId next_stream = 1000;
thread_local bool watching = true;
thread_local Clock thread_clock;

c10::DeviceIndex index_of(c10::Device d) { return d.index() < 0 ? current : d.index(); }

c10::StreamId stream_of(c10::DeviceIndex device) {
  auto found = current_streams.find(device);
  return found == current_streams.end() ? c10::StreamId(device) : found->second;  // default streams are 0, 1, 2, 3
}

void join(Clock& into, const Clock& other) {
  for (auto& [stream, time] : other) into[stream] = std::max(into[stream], time);
}

bool covers(const Clock& clock, c10::StreamId stream, long time) {
  auto found = clock.find(stream);
  return found != clock.end() && found->second >= time;
}

bool covers(const Clock& clock, const Clock& needed) {
  for (auto& [stream, time] : needed)
    if (!covers(clock, stream, time)) return false;
  return true;
}

void begin_kernel(c10::StreamId stream) {
  join(clocks[stream], thread_clock);
  clocks[stream][stream] = ++kernels;
}

bool is_simulated(const at::Tensor& t) { return t.defined() && t.device().type() == kType && t.has_storage(); }

Memory* memory_of(const at::Tensor& t) {
  if (!is_simulated(t) || t.storage().nbytes() == 0) return nullptr;
  auto found = memory.find(t.storage().mutable_data());
  return found == memory.end() ? nullptr : &found->second;
}

void touch(const at::Tensor& t, bool write, const std::string& op, c10::StreamId stream) {
  Memory* m = memory_of(t);
  if (!m) return;
  auto& mine = clocks[stream];
  if (!covers(mine, m->written))
    races.push_back(op + (write ? " writes" : " reads") + " what another stream has not finished writing");
  if (write && !covers(mine, m->read)) races.push_back(op + " writes what another stream still reads");
  m->last = op;
  if (write) {
    m->written = {{stream, mine[stream]}};
    m->read.clear();
  } else {
    m->read[stream] = mine[stream];
  }
}

void require_done(const Memory& m, const Clock& use) {
  auto& owner = clocks[m.owner];
  for (auto& [stream, time] : use) {
    bool recorded = std::find(m.recorded.begin(), m.recorded.end(), stream) != m.recorded.end();
    if (stream != m.owner && !recorded && !covers(owner, stream, time))
      races.push_back("memory is freed while another stream uses it (" + m.last + ")");
  }
}

// ---- Memory

struct Allocator final : c10::Allocator {
  static void drop(void* p) {
    if (!p) return;
    std::lock_guard<std::mutex> guard(lock);
    auto found = memory.find(p);
    if (found != memory.end()) {
      require_done(found->second, found->second.read);
      require_done(found->second, found->second.written);
      memory.erase(found);
    }
    free(p);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* p = nullptr;
    if (bytes) {
      if (posix_memalign(&p, 64, bytes)) throw std::bad_alloc();
      std::lock_guard<std::mutex> guard(lock);
      memory[p] = Memory{{}, {}, bytes, stream_of(current), {}, ""};
    }
    return {p, p, &drop, c10::Device(kType, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Allocator allocator;
REGISTER_ALLOCATOR(kType, &allocator);

void record_stream(void* p, c10::StreamId stream) {
  std::lock_guard<std::mutex> guard(lock);
  auto found = memory.find(p);
  if (found != memory.end()) found->second.recorded.push_back(stream);
}

// ---- Devices, streams and events

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::Stream stream(c10::DeviceIndex device, c10::StreamId id) const {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), id);
  }
  void wait(const Clock& clock) const {
    ++waits;
    std::lock_guard<std::mutex> guard(lock);
    join(thread_clock, clock);
  }
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto old = current;
    current = index_of(d);
    return {kType, old};
  }
  c10::Device getDevice() const override { return {kType, current}; }
  void setDevice(c10::Device d) const override { current = index_of(d); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { current = index_of(d); }
  c10::Stream getStream(c10::Device d) const override { return stream(index_of(d), stream_of(index_of(d))); }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream(index_of(d), index_of(d)); }
  c10::Stream getNewStream(c10::Device d, int) const override {
    std::lock_guard<std::mutex> guard(lock);
    return stream(index_of(d), next_stream++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto old = getStream(s.device());
    current_streams[s.device_index()] = s.id();
    return old;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard<std::mutex> guard(lock);
    if (!*event) *event = new char;
    events[*event] = clocks[s.id()];
  }
  void block(void* event, const c10::Stream& s) const override {
    std::lock_guard<std::mutex> guard(lock);
    if (event) join(clocks[s.id()], events[event]);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    std::lock_guard<std::mutex> guard(lock);
    events.erase(event);
    delete static_cast<char*>(event);
  }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override { wait(events[event]); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& s) const override { wait(clocks[s.id()]); }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    for (auto& [stream, clock] : clocks) wait(clock);
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override { record_stream(p.get(), s.id()); }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.0; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

at::Generator& generator_of(int64_t device) {
  static std::vector<at::Generator> made = [] {
    std::vector<at::Generator> found;
    for (int i = 0; i < kDevices; ++i) found.push_back(at::make_generator<at::CPUGeneratorImpl>(12345 + i));
    return found;
  }();
  return made.at(device < 0 ? current : device);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex d) const override { current = d; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override { return std::exchange(current, d); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return std::exchange(current, d); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
  bool isPinnedPtr(const void*) const override { return false; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override { return generator_of(d); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(1); }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    at::native::resize_bytes_cpu(s.unsafeGetStorageImpl(), n);
  }
};
Hooks hooks;
[[maybe_unused]] bool registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

// ---- Tensors

using Sizes = c10::IntArrayRef;
using DType = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using MaybeDevice = std::optional<at::Device>;
using Format = std::optional<at::MemoryFormat>;
const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(Sizes size, DType dtype, Layout, MaybeDevice device, std::optional<bool>, Format format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &allocator, kKeys, dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}

at::Tensor empty_strided(Sizes size, Sizes stride, DType dtype, Layout, MaybeDevice device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, &allocator, kKeys, dtype.value_or(at::get_default_dtype_as_scalartype()));
}

at::Tensor as_cpu(const at::Tensor& t) {  // the same memory, seen by the CPU
  if (t.device().type() != kType) return t;
  auto data = c10::DataPtr(t.storage().mutable_data(), at::kCPU);
  auto storage = c10::Storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(), std::move(data));
  auto out = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  return out;
}

c10::StreamId end_of(const at::Tensor& t) {
  return t.device().type() == kType ? stream_of(t.device().index()) : kHost;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  {
    std::lock_guard<std::mutex> guard(lock);
    auto source = end_of(self), target = end_of(to);
    auto on = source != kHost ? source : target;
    bool between = source != kHost && target != kHost && source != target;
    if (between) join(clocks[source], clocks[target]);  // it waits for both current streams, as on CUDA
    begin_kernel(on);
    if (watching) {
      touch(self, false, "copy", on);
      touch(to, true, "copy", on);
      if (non_blocking && source == kHost)
        races.push_back("copy reads memory of the CPU, which nothing keeps from being written before it ends");
    }
    if (between) join(clocks[target], clocks[source]);
    if (watching && !non_blocking && (source == kHost || target == kHost)) {
      ++waits;
      join(thread_clock, clocks[on]);
    }
  }
  as_cpu(to).copy_(as_cpu(self));
  return to;
}

const at::Tensor& resize_(const at::Tensor& self, Sizes size, Format format) {
  c10::OptionalDeviceGuard guard(self.device());
  at::native::resize_impl_cpu_(self.unsafeGetTensorImpl(), size, std::nullopt);
  if (format && *format != at::MemoryFormat::Preserve) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  resize_(to, self.sizes(), std::nullopt);
  return copy_from(self, to, false);
}

at::Tensor strided(const at::Tensor& self, Sizes size, Sizes stride, std::optional<int64_t> offset) {
  auto t = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset.value_or(self.storage_offset()));
  return t;
}

at::Tensor view(const at::Tensor& self, Sizes size) {
  auto full = at::infer_size_dv(size, self.numel());
  auto stride = at::detail::computeStride(self.sizes(), self.strides(), full);
  TORCH_CHECK(stride.has_value(), "view size is not compatible with the strides of the tensor");
  return strided(self, full, *stride, self.storage_offset());
}

at::Tensor reshape_alias(const at::Tensor& self, Sizes size, Sizes stride) {
  return strided(self, size, stride, self.storage_offset());
}

at::Tensor& set_(at::Tensor& self, at::Storage source, int64_t offset, Sizes size, Sizes stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

at::Scalar local_scalar(const at::Tensor& t) {
  {
    std::lock_guard<std::mutex> guard(lock);
    begin_kernel(end_of(t));
    touch(t, false, "item", end_of(t));  // a copy on the current stream, for which the thread waits
    ++waits;
    join(thread_clock, clocks[end_of(t)]);
  }
  return as_cpu(t).item();
}

void record(at::Tensor& t, c10::Stream s) { record_stream(t.storage().mutable_data(), s.id()); }

// ---- All other ops run as the CPU's, on copies

using Seen = const std::function<void(const at::Tensor&, bool)>&;

void each(const c10::FunctionSchema& schema, torch::jit::Stack& stack, size_t begin, Seen see) {
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    auto& value = stack[begin + i];
    auto* alias = schema.arguments()[i].alias_info();
    bool written = alias && alias->isWrite();
    if (value.isTensor()) see(value.toTensor(), written);
    else if (value.isTensorList())
      for (at::Tensor t : value.toTensorList()) see(t, written);
    else if (value.isOptionalTensorList())
      for (auto t : value.toOptionalTensorVector())
        if (t) see(*t, written);
  }
}

void made(const at::Tensor& t, c10::StreamId stream) {
  if (Memory* m = memory_of(t)) m->written = {{stream, clocks[stream][stream]}};
}

// What draws random numbers draws them from the device's generator.
void call(const c10::OperatorHandle& op, torch::jit::Stack* stack, const std::optional<c10::Device>& where) {
  static std::mutex drawing;
  if (!where || !op.hasTag(at::Tag::nondeterministic_seeded)) return at::native::cpu_fallback(op, stack, false);
  std::lock_guard<std::mutex> guard(drawing);
  at::Generator cpu = at::detail::getDefaultCPUGenerator();
  auto& own = generator_of(where->index());
  auto before = cpu.get_state();
  cpu.set_state(own.get_state());
  at::native::cpu_fallback(op, stack, false);
  own.set_state(cpu.get_state());
  cpu.set_state(before);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& schema = op.schema();
  auto& name = schema.name();
  auto begin = stack->size() - schema.arguments().size();
  std::optional<c10::Device> where;
  auto wrong = [&](const at::Tensor& t) {
    TORCH_CHECK(false, name, ": expected all tensors to be on the same device, but found ", *where, " and ", t.device());
  };
  each(schema, *stack, begin, [&](const at::Tensor& t, bool) {
    if (!t.defined() || t.device().type() != kType) return;
    if (where && *where != t.device()) wrong(t);
    where = t.device();
  });
  each(schema, *stack, begin, [&](const at::Tensor& t, bool) {
    if (t.defined() && where && t.device().type() == at::kCPU && t.dim() > 0) wrong(t);
  });
  c10::OptionalDeviceGuard guard(where);
  c10::StreamId stream = where ? stream_of(where->index()) : kHost;
  if (where) {
    std::lock_guard<std::mutex> guard(lock);
    begin_kernel(stream);
    if (watching) each(schema, *stack, begin, [&](const at::Tensor& t, bool w) { touch(t, w, name, stream); });
  }
  bool was = std::exchange(watching, false);
  try {
    call(op, stack, where);
  } catch (...) {
    watching = was;
    throw;
  }
  watching = was;
  if (!where) return;
  std::lock_guard<std::mutex> again(lock);
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) made(value.toTensor(), stream);
    else if (value.isTensorList())
      for (at::Tensor t : value.toTensorList()) made(t, stream);
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("as_strided", strided);
  m.impl("resize_", resize_);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("set_.source_Storage_storage_offset", set_);
  m.impl("record_stream", record);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
}

TORCH_LIBRARY(simgpu, m) {
  m.def("races", [] {
    std::lock_guard<std::mutex> guard(lock);
    return std::exchange(races, {});
  });
  m.def("waits", []() -> int64_t { return waits; });
  m.def("set_waits", [](int64_t count) { waits = count; });
  m.def("count", []() -> int64_t { return kDevices; });
  m.def("current", []() -> int64_t { return current; });
  m.def("set_current", [](int64_t device) { current = device; });
  m.def("seed", [](int64_t device, int64_t seed) { generator_of(device).set_current_seed(seed); });
  m.def("state", [](int64_t device) { return generator_of(device).get_state(); });
  m.def("set_state", [](const at::Tensor& state, int64_t device) { generator_of(device).set_state(state); });
}

}  // namespace
