// Recorded allocations and kernel launches, repeated with other addresses: replay.py in C++.
//
// A `Program` is one recorded Replay. A `Step` is a Program beside the Python Replay that it
// repeats; it calls the Replay whenever the tensors are not those that were recorded.

#pragma once

#include <torch/csrc/autograd/python_variable.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/SmallVector.h>

#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

namespace deepcontrol {

namespace py = pybind11;
using at::Tensor;
using Tensors = c10::SmallVector<Tensor, 8>;
using TensorPointers = c10::SmallVector<const Tensor*, 16>;

// Python objects must not be released while or after the interpreter shuts down.
inline void release(py::object& object) {
  if (!object) return;
  if (!Py_IsInitialized()) {
    object.release();
    return;
  }
  py::gil_scoped_acquire gil;
  object = py::object();
}

// The functions of the CUDA driver, found at run time: no toolkit is needed to compile this file.
struct Driver {
  int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*,
                void**, void**) = nullptr;
  int (*is_capturing)(void*, int*) = nullptr;
  int (*get_context)(void**) = nullptr;
  int (*set_context)(void*) = nullptr;
  int (*get_device)(int*, int) = nullptr;
  int (*retain_context)(void**, int) = nullptr;
  int (*error_name)(int, const char**) = nullptr;
  int32_t (*current_stream)(int32_t, void**) = nullptr;  // of torch's stable C interface
  bool complete = false;

  Driver() {
    void* cuda = dlopen("libcuda.so.1", RTLD_LAZY);
    void* torch_cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    if (cuda == nullptr || torch_cuda == nullptr) return;
    complete = find(cuda, "cuLaunchKernel", launch) &&
        find(cuda, "cuStreamIsCapturing", is_capturing) &&
        find(cuda, "cuCtxGetCurrent", get_context) &&
        find(cuda, "cuCtxSetCurrent", set_context) && find(cuda, "cuDeviceGet", get_device) &&
        find(cuda, "cuDevicePrimaryCtxRetain", retain_context) &&
        find(cuda, "cuGetErrorName", error_name) &&
        find(torch_cuda, "aoti_torch_get_current_cuda_stream", current_stream);
  }

  template <typename F>
  static bool find(void* library, const char* name, F& function) {
    function = reinterpret_cast<F>(dlsym(library, name));
    return function != nullptr;
  }

  // A thread of autograd that has made no CUDA call has no context yet.
  void ensure_context(int index) const {
    void* context = nullptr;
    if (get_context(&context) == 0 && context != nullptr) return;
    int device = 0;
    const bool found = get_device(&device, index) == 0 && retain_context(&context, device) == 0 &&
        set_context(context) == 0;
    TORCH_CHECK(found, "cannot set the CUDA context of device ", index);
  }

  static const Driver& get() {
    static const Driver driver;
    return driver;
  }
};

// The current stream of a device. Without a device (CPU tensors in tests) there is none.
struct Stream {
  int device = -1;
  void* handle = nullptr;
  bool current = true;  // whether the device is the current one
  bool capturing = false;

  explicit Stream(int device) : device(device) {
    if (device < 0) return;
    const Driver& driver = Driver::get();
    const auto* guard = c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA);
    current = guard->getDevice().index() == device;
    if (!current) return;
    driver.ensure_context(device);
    TORCH_CHECK(driver.current_stream(device, &handle) == 0, "torch has no current CUDA stream");
    int status = 0;
    // An error means that another stream is capturing: also a case for the Python path.
    capturing = driver.is_capturing(handle, &status) != 0 || status != 0;
  }
};

struct Layout {
  c10::SmallVector<int64_t, 5> sizes, strides;
  at::ScalarType dtype;

  bool matches(const Tensor& a) const {
    return a.defined() && a.scalar_type() == dtype && a.sizes() == at::IntArrayRef(sizes) &&
        a.strides() == at::IntArrayRef(strides);
  }

  static Layout of(const Tensor& a) {
    Layout found;
    found.sizes.assign(a.sizes().begin(), a.sizes().end());
    found.strides.assign(a.strides().begin(), a.strides().end());
    found.dtype = a.scalar_type();
    return found;
  }

  static Layout from_python(const py::handle& description) {
    auto items = py::reinterpret_borrow<py::tuple>(description);
    Layout found;
    for (auto size : items[0]) found.sizes.push_back(size.cast<int64_t>());
    for (auto stride : items[1]) found.strides.push_back(stride.cast<int64_t>());
    found.dtype = items[2].cast<at::ScalarType>();
    return found;
  }
};

// An argument of a launch: the tensor in a slot of the table, or else a constant.
struct Argument {
  int slot;
  uint64_t value;     // for a kernel
  py::object object;  // for a Python function
};

struct Launch {
  void* kernel = nullptr;  // a CUfunction; null for a Python function (Triton's interpreter)
  py::object function;
  unsigned grid[3], threads, shared;
  std::vector<Argument> arguments;

  void run_kernel(const uint64_t* addresses, void* stream) const {
    constexpr size_t kMax = 64;
    uint64_t values[kMax];
    void* parameters[kMax];
    size_t n = 0;
    for (const Argument& each : arguments) {
      values[n] = each.slot >= 0 ? addresses[each.slot] : each.value;
      parameters[n] = &values[n];
      ++n;
    }
    const Driver& driver = Driver::get();
    int error = driver.launch(kernel, grid[0], grid[1], grid[2], threads, 1, 1, shared, stream,
                              parameters, nullptr);
    if (error != 0) {
      const char* name = "unknown";
      driver.error_name(error, &name);
      TORCH_CHECK(false, "CUDA error at a kernel launch: ", name);
    }
  }

  void run_function(const TensorPointers& table) const {
    py::gil_scoped_acquire gil;
    py::list values;
    for (const Argument& each : arguments) {
      values.append(each.slot < 0 ? each.object : py::cast(*table[each.slot]));
    }
    function(grid[0], grid[1], grid[2], py::none(), *values);
  }

  static constexpr size_t kMaxArguments = 64;
};

class Program {
 public:
  // description: (inputs, allocations, launches, results, device), as `describe` in __init__.py makes it.
  explicit Program(const py::tuple& description) {
    for (auto input : description[0]) {
      inputs_.emplace_back();
      if (!input.is_none()) inputs_.back() = Layout::from_python(input);
    }
    device_ = description[4].cast<int>();
    auto device = device_ < 0 ? at::Device(at::kCPU)
                              : at::Device(at::kCUDA, static_cast<at::DeviceIndex>(device_));
    for (auto allocation : description[1]) {
      allocations_.push_back(Layout::from_python(allocation));
      options_.push_back(at::TensorOptions(allocations_.back().dtype).device(device));
    }
    for (auto each : description[2]) {
      auto items = py::reinterpret_borrow<py::tuple>(each);
      Launch launch;
      if (py::isinstance<py::int_>(items[0])) {
        launch.kernel = reinterpret_cast<void*>(items[0].cast<uintptr_t>());
      } else {
        launch.function = items[0];
      }
      auto grid = items[1].cast<std::vector<unsigned>>();
      std::copy(grid.begin(), grid.end(), launch.grid);
      launch.threads = items[2].cast<unsigned>();
      launch.shared = items[3].cast<unsigned>();
      for (auto item : items[4]) {
        auto pair = py::reinterpret_borrow<py::tuple>(item);
        Argument argument{pair[0].cast<int>(), 0, py::object()};
        if (launch.kernel == nullptr) {
          argument.object = pair[1];
        } else if (argument.slot < 0) {
          argument.value = pair[1].cast<uint64_t>();
        }
        launch.arguments.push_back(std::move(argument));
      }
      TORCH_CHECK(launch.arguments.size() <= Launch::kMaxArguments, "too many kernel arguments");
      launches_.push_back(std::move(launch));
    }
    for (auto result : description[3]) results_.push_back(result.cast<int>());
  }

  ~Program() {
    for (Launch& launch : launches_) {
      release(launch.function);
      for (Argument& argument : launch.arguments) release(argument.object);
    }
  }

  bool uses(size_t input) const { return inputs_[input].has_value(); }
  const std::vector<int>& results() const { return results_; }

  // Allocate, launch and fill `results`; return false, with nothing launched, if the tensors are
  // not as recorded. Inputs that no launch reads are not looked at and may be missing.
  bool run(const TensorPointers& inputs, const Stream& stream, Tensors& results) const {
    if (!stream.current || stream.device != device_) return false;
    for (size_t i = 0; i < inputs_.size(); ++i) {
      if (!inputs_[i]) continue;
      const Tensor* a = inputs[i];
      if (a == nullptr || !inputs_[i]->matches(*a)) return false;
      if (a->is_cuda() != (device_ >= 0) || (device_ >= 0 && a->get_device() != device_)) {
        return false;
      }
    }
    TensorPointers table(inputs.begin(), inputs.end());
    Tensors owned;
    owned.reserve(allocations_.size());  // the table points into it
    {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      for (size_t i = 0; i < allocations_.size(); ++i) {
        const Layout& layout = allocations_[i];
        owned.push_back(at::empty_strided(layout.sizes, layout.strides, options_[i]));
        table.push_back(&owned.back());
      }
    }
    c10::SmallVector<uint64_t, 24> addresses(table.size());
    uint64_t all = 0;
    for (size_t i = 0; i < table.size(); ++i) {
      if (i < inputs_.size() && !inputs_[i]) continue;
      addresses[i] = reinterpret_cast<uint64_t>(table[i]->data_ptr());
      all |= addresses[i];
    }
    if (all & 15) return false;  // Triton specializes a kernel for multiples of 16
    if (device_ >= 0) {
      for (const Launch& launch : launches_) launch.run_kernel(addresses.data(), stream.handle);
    } else {
      for (const Launch& launch : launches_) launch.run_function(table);
    }
    const int given = static_cast<int>(inputs_.size());
    results.clear();
    for (int slot : results_) {
      if (slot < 0) {
        results.emplace_back();
      } else if (slot < given) {
        results.push_back(*table[slot]);
      } else {
        results.push_back(owned[slot - given]);
      }
    }
    return true;
  }

 private:
  std::vector<std::optional<Layout>> inputs_;  // nullopt: absent, or read by no launch
  std::vector<Layout> allocations_;
  std::vector<at::TensorOptions> options_;
  std::vector<Launch> launches_;
  std::vector<int> results_;
  int device_;
};

// A Replay of Python and, once that has recorded it, the Program that does the same.
class Step {
 public:
  Step() = default;
  Step(py::object replay, py::object describe)
      : replay_(std::move(replay)), describe_(std::move(describe)) {
    prepare();
  }
  ~Step() {
    delete program_.load();
    release(replay_);
    release(describe_);
  }
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

  const Program* program() const { return program_.load(std::memory_order_acquire); }

  // Return whether the program ran; otherwise Python did. Gradients must be disabled.
  bool run(const TensorPointers& inputs, const Stream& stream, Tensors& results) {
    const Program* program = this->program();
    if (program != nullptr && program->run(inputs, stream, results)) return true;
    py::gil_scoped_acquire gil;
    py::tuple arguments(inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      const Tensor* a = inputs[i];
      arguments[i] = a == nullptr || !a->defined() ? py::none() : py::cast(*a);
    }
    py::object found = replay_(*arguments);
    results.clear();
    if (py::isinstance<py::tuple>(found)) {
      for (auto each : found) results.push_back(tensor(each));
    } else {
      results.push_back(tensor(found));
    }
    if (program == nullptr) prepare();
    return false;
  }

 private:
  static Tensor tensor(const py::handle& object) {
    return object.is_none() ? Tensor() : object.cast<Tensor>();
  }

  // With the GIL. A program is set once and stays, so that others may run it at the same time.
  void prepare() {
    if (tries_left_ == 0 || program_.load() != nullptr) return;
    --tries_left_;
    py::object description = describe_(replay_);
    if (description.is_none()) return;
    auto* made = new Program(description.cast<py::tuple>());
    Program* none = nullptr;  // another thread may have made one meanwhile
    if (!program_.compare_exchange_strong(none, made)) delete made;
  }

  py::object replay_, describe_;
  std::atomic<Program*> program_{nullptr};
  int tries_left_ = 16;
};

}  // namespace deepcontrol
