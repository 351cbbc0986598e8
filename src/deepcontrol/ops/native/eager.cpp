// The eager mode of AGCConv and AGC layers: one autograd node per layer, without Python.
//
// The Python path (ops/neuron.py, ops/agc.py) is the specification and makes all decisions. Once it
// has recorded the kernel launches of a layer, `add` gives them to this file, together with
// everything that they depend on. `run` compares these with the present state and repeats the
// launches and the convolution. Where anything differs, it returns None, and the caller takes the
// Python path.

#include "program.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <ATen/autocast_mode.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

namespace deepcontrol {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using NodePointer = decltype(torch::autograd::Edge::function);

// Objects of Python that the extension reads; never released.
struct Python {
  PyObject* compiler;         // globals of torch.compiler
  PyObject* forward_ad;       // globals of torch.autograd.forward_ad
  PyObject* environment;      // the dict behind os.environ
  PyObject* kernel_switch;    // key of DEEPCONTROL_KERNELS in it
  py::object describe;        // a recorded Replay -> the arguments of a Program, or None
  py::object stored_sums;     // map sums stored for a tensor, or None
  py::object store_sums;      // store the map sums of a tensor
  PyObject *compiling, *exporting, *level, *parameters;  // names
};
Python* python = nullptr;

struct Counters {
  std::atomic<int64_t> forward{0}, backward{0}, python_backward{0}, python_steps{0};
} counters;

// ---- A layer, prepared for inputs of one shape, layout and dtype ----

struct Layer {
  bool is_neuron;
  int device;  // -1 for the CPU
  py::object plan, backward_in_python;
  Step forward, backward;
  // Of a neuron:
  Step scale, backward_sums, filter_gradients;
  at::ScalarType dtype;
  std::vector<int64_t> stride, padding, dilation, output_padding;
  int64_t groups;
  bool training, saves_scaled, joint_gradients, derives_mean, pools;

  Layer(const py::dict& spec)
      : is_neuron(spec.contains("scale")),
        device(spec["device"].cast<int>()),
        plan(spec["plan"]),
        backward_in_python(spec["backward_in_python"]),
        forward(spec["forward"], python->describe),
        backward(spec["backward"], python->describe),
        scale(get(spec, "scale"), python->describe),
        backward_sums(get(spec, "backward_sums"), python->describe),
        filter_gradients(get(spec, "filter_gradients"), python->describe) {
    if (!is_neuron) return;
    dtype = spec["dtype"].cast<at::ScalarType>();
    stride = spec["stride"].cast<std::vector<int64_t>>();
    padding = spec["padding"].cast<std::vector<int64_t>>();
    dilation = spec["dilation"].cast<std::vector<int64_t>>();
    output_padding.assign(stride.size(), 0);
    groups = spec["groups"].cast<int64_t>();
    training = spec["training"].cast<bool>();
    saves_scaled = spec["saves_scaled"].cast<bool>();
    joint_gradients = spec["joint_gradients"].cast<bool>();
    derives_mean = spec["derives_mean"].cast<bool>();
    pools = spec["pools"].cast<bool>();
  }
  ~Layer() {
    release(plan);
    release(backward_in_python);
  }

  static py::object get(const py::dict& spec, const char* name) {
    return spec.contains(name) ? py::object(spec[name]) : py::object(py::none());
  }
};

void run_step(Step& step, const TensorPointers& inputs, const Stream& stream, Tensors& results) {
  if (!step.run(inputs, stream, results)) ++counters.python_steps;
}

// Whether no transform, tracer or dispatch mode is active.
bool plain_dispatch() {
  auto included = c10::impl::tls_local_dispatch_key_set().included_;
  included = included.remove(c10::DispatchKey::ADInplaceOrView);
  return included.remove(c10::DispatchKey::BackendSelect).empty();
}

// ---- Backward ----

struct LayerBackward : public Node {
  std::shared_ptr<Layer> layer;
  std::array<SavedVariable, 9> saved;
  size_t count = 0;      // of saved tensors
  size_t output = 9;     // which of them is the output of the node
  c10::DispatchKeySet keys;  // of ordinary tensors of this device

  void save(const Tensor& a) { saved[count++] = SavedVariable(a, /*is_output=*/false); }
  void save_output(const Tensor& y) {
    output = count;
    saved[count++] = SavedVariable(y, /*is_output=*/true);
  }

  std::string name() const override { return layer->is_neuron ? "AGCConvBackward" : "AGCBackward"; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < count; ++i) saved[i].reset_data();
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    TORCH_CHECK(false,
                "the compiled helper of deepcontrol does not support compiled autograd. "
                "Set the environment variable DEEPCONTROL_NATIVE=0.");
  }

 protected:
  variable_list apply(variable_list&& grads) override {
    const size_t inputs = layer->is_neuron ? 5 : 4;
    Tensor g = std::move(grads[0]);
    grads.clear();
    if (!g.defined()) return variable_list(inputs);
    std::array<Tensor, 9> s;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (size_t i = 0; i < count; ++i) {
        s[i] = saved[i].unpack(i == output ? getptr() : NodePointer());
      }
    }
    const Stream stream(layer->device);
    const bool plain = at::GradMode::is_enabled() || g.key_set() != keys || !plain_dispatch() ||
        torch::autograd::isFwGradDefined(g);
    // While a CUDA graph is captured, Python records two branches.
    if (plain || stream.capturing || !stream.current) return in_python(g, s, inputs);
    ++counters.backward;
    return layer->is_neuron ? of_neuron(g, s, stream) : of_norm(g, s, stream);
  }

 private:
  variable_list in_python(const Tensor& g, const std::array<Tensor, 9>& s, size_t inputs) {
    ++counters.python_backward;
    py::gil_scoped_acquire gil;
    py::tuple tensors(count), needs(inputs);
    for (size_t i = 0; i < count; ++i) {
      tensors[i] = s[i].defined() ? py::cast(s[i]) : py::none();
    }
    for (size_t i = 0; i < inputs; ++i) needs[i] = py::bool_(should_compute_output(i));
    py::tuple found = layer->backward_in_python(layer->plan, tensors, g, needs);
    variable_list result(inputs);
    for (size_t i = 0; i < inputs; ++i) {
      if (!found[i].is_none() && should_compute_output(i)) result[i] = found[i].cast<Tensor>();
    }
    return result;
  }

  variable_list of_norm(const Tensor& g, const std::array<Tensor, 9>& s, const Stream& stream) {
    Tensors found;
    run_step(layer->backward, {&g, &s[0], &s[1], &s[2], &s[3], &s[4]}, stream, found);
    return needed({found[0], found[1], found[2], found[3]});
  }

  variable_list of_neuron(Tensor& g, std::array<Tensor, 9>& s, const Stream& stream) {
    const Tensor &x = s[0], &weight = s[1], &gain = s[2], &map = s[4], &index = s[5];
    const Tensor &bias = s[6], &mean_scale = s[7], &mean = s[8];
    Tensor& scaled = s[3];
    const bool of_x = should_compute_output(0);
    const bool of_filters = should_compute_output(1) || should_compute_output(2);
    Tensor sum_h, dv, dbias, dscale;
    Tensors found;
    const TensorPointers maps{&g, &map, &index, &mean, &bias, &mean_scale};
    if (of_filters && layer->joint_gradients) {
      run_step(layer->backward_sums, maps, stream, found);
      sum_h = found[1];
    } else {
      run_step(layer->backward, maps, stream, found);
      dbias = found[1];
      dscale = found[2];
    }
    dv = std::move(found[0]);
    found.clear();
    g.reset();  // its memory may serve for the gradient of x
    if (!x.defined()) return needed({Tensor(), Tensor(), Tensor(), dbias, dscale});
    if (!scaled.defined()) {
      run_step(layer->scale, {&weight, &gain}, stream, found);
      scaled = std::move(found[0]);
    }
    Tensor dx, dscaled, dweight, dgain;
    {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      std::tie(dx, dscaled, std::ignore) = at::convolution_backward(
          dv, x, scaled, std::nullopt, layer->stride, layer->padding, layer->dilation, false,
          layer->output_padding, layer->groups, {of_x, of_filters, false});
    }
    dv.reset();
    if (of_filters) {
      run_step(layer->filter_gradients, {&dscaled, &weight, &gain, &sum_h, &mean, &bias, &mean_scale},
               stream, found);
      dweight = std::move(found[0]);
      dgain = std::move(found[1]);
      if (sum_h.defined()) {
        dbias = std::move(found[2]);
        dscale = std::move(found[3]);
      }
    }
    found.clear();  // a gradient with one owner becomes .grad without a copy
    return needed({std::move(dx), std::move(dweight), std::move(dgain), std::move(dbias),
                   std::move(dscale)});
  }

  variable_list needed(std::array<Tensor, 5>&& grads) {
    variable_list result(layer->is_neuron ? 5 : 4);
    for (size_t i = 0; i < result.size(); ++i) {
      if (should_compute_output(i)) result[i] = std::move(grads[i]);
    }
    return result;
  }
};

// Nodes are held by std::shared_ptr until torch 2.12 and by c10::intrusive_ptr from then on.
template <typename N, typename Pointer>
struct MakeNode;
template <typename N>
struct MakeNode<N, std::shared_ptr<Node>> {
  static auto make() {
    return std::shared_ptr<N>(new N(), [](auto* node) { deleteNode(node); });
  }
};
template <typename N>
struct MakeNode<N, c10::intrusive_ptr<Node>> {
  static auto make() { return c10::make_intrusive<N>(); }
};

// ---- Forward ----

struct Outputs {
  Tensor y, index, sums;
};

Outputs neuron_forward(const std::shared_ptr<Layer>& layer, const Tensor& input,
                       const std::array<const Tensor*, 4>& parameters, const Tensor& map_sums,
                       const Stream& stream) {
  const Tensor &weight = *parameters[0], &gain = *parameters[1];
  const Tensor &bias = *parameters[2], &mean_scale = *parameters[3];
  // Cast before autograd saves it: the copy saved is the small one.
  const Tensor x = input.scalar_type() == layer->dtype ? input : input.to(layer->dtype);
  Tensor scaled;
  Tensors found;
  {
    at::AutoGradMode no_grad(false);
    run_step(layer->scale, {&weight, &gain}, stream, found);
    scaled = std::move(found[0]);
    Tensor v;
    {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      v = at::convolution(x, scaled, std::nullopt, layer->stride, layer->padding, layer->dilation,
                          false, layer->output_padding, layer->groups);
    }
    run_step(layer->forward, {&v, &bias, &mean_scale, &x, &scaled, &map_sums}, stream, found);
  }
  Outputs out{found[0], found[1], found[4]};
  if (!layer->training) return out;
  const bool of_operands = x.requires_grad() || weight.requires_grad() || gain.requires_grad();
  if (!of_operands && !bias.requires_grad() && !mean_scale.requires_grad()) return out;
  auto node = MakeNode<LayerBackward, NodePointer>::make();
  node->layer = layer;
  node->keys = out.y.key_set();
  node->set_next_edges(torch::autograd::collect_next_edges(x, weight, gain, bias, mean_scale));
  torch::autograd::set_history(out.y, node);
  const Tensor none;
  node->save(of_operands ? x : none);
  node->save(of_operands ? weight : none);
  node->save(of_operands ? gain : none);
  node->save(of_operands && layer->saves_scaled ? scaled : none);
  const Tensor& map = found[3];
  if (map.defined() && map.is_same(out.y)) {
    node->save_output(out.y);
  } else {
    node->save(map);
  }
  node->save(out.index);
  node->save(bias);
  node->save(mean_scale);
  node->save(found[2]);
  return out;
}

Tensor norm_forward(const std::shared_ptr<Layer>& layer, const Tensor& z,
                    const std::array<const Tensor*, 4>& parameters, const Stream& stream) {
  const Tensor &weight = *parameters[0], &bias = *parameters[1], &mean_scale = *parameters[2];
  Tensors found;
  {
    at::AutoGradMode no_grad(false);
    run_step(layer->forward, {&z, &weight, &bias, &mean_scale}, stream, found);
  }
  const Tensor y = std::move(found[0]), mean = std::move(found[1]);
  const bool needs_grad = z.requires_grad() || weight.requires_grad() || bias.requires_grad() ||
      mean_scale.requires_grad();
  if (!at::GradMode::is_enabled() || !needs_grad) return y;
  auto node = MakeNode<LayerBackward, NodePointer>::make();
  node->layer = layer;
  node->keys = y.key_set();
  node->set_next_edges(torch::autograd::collect_next_edges(z, weight, bias, mean_scale));
  torch::autograd::set_history(y, node);
  for (const Tensor* a : {&z, &weight, &bias, &mean_scale, &mean}) node->save(*a);
  return y;
}

// ---- Modules and the state that their layers were prepared for ----

struct TensorState {
  Layout layout;
  c10::DispatchKeySet keys;
  at::Device device = at::kCPU;

  bool matches(const Tensor& a) const {
    return a.key_set() == keys && a.device() == device && layout.matches(a);
  }
};

struct Setting {
  PyObject* name;    // interned
  py::object value;  // immutable; a list is compared with a tuple of its items
  bool is_list;

  bool matches(PyObject* module) const {
    PyObject* found = PyObject_GetAttr(module, name);
    if (found == nullptr) {
      PyErr_Clear();
      return false;
    }
    bool same = found == value.ptr();
    if (is_list && PyList_CheckExact(found)) {
      const Py_ssize_t n = PyTuple_GET_SIZE(value.ptr());
      same = PyList_GET_SIZE(found) == n;
      for (Py_ssize_t i = 0; same && i < n; ++i) {
        same = PyList_GET_ITEM(found, i) == PyTuple_GET_ITEM(value.ptr(), i);
      }
    }
    Py_DECREF(found);
    return same;
  }
};

struct Entry {
  std::shared_ptr<Layer> layer;
  std::vector<Setting> settings;
  TensorState input;
  std::vector<PyObject*> names;  // of parameters, interned
  std::vector<TensorState> parameters;
  bool autocast, grad_mode, inference_mode;
  at::ScalarType autocast_dtype;
  std::optional<Layout> map_sums;
};

struct Module {
  py::object reference;  // weak; the address of a module may be that of one that is gone
  std::vector<std::shared_ptr<Entry>> entries;
  int adds_left = 64;  // a module whose inputs keep changing is left to Python
};

constexpr size_t kMaxEntries = 32;  // of one module: shapes, with and without gradients
std::unordered_map<PyObject*, Module>& modules = *new std::unordered_map<PyObject*, Module>();
size_t purge_at = 256;

PyObject* referent(const Module& module) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* found = nullptr;
  if (PyWeakref_GetRef(module.reference.ptr(), &found) > 0) Py_DECREF(found);
  return found;
#else
  return PyWeakref_GetObject(module.reference.ptr());
#endif
}

bool is_true(PyObject* globals, PyObject* name) {
  PyObject* value = PyDict_GetItemWithError(globals, name);
  return value != nullptr && value != Py_False;
}

bool is_eager() {
  if (!plain_dispatch() || is_true(python->compiler, python->compiling) ||
      is_true(python->compiler, python->exporting)) {
    return false;
  }
  PyObject* level = PyDict_GetItemWithError(python->forward_ad, python->level);
  if (level == nullptr || !PyLong_Check(level) || PyLong_AsLong(level) >= 0) return false;
  return PyDict_GetItemWithError(python->environment, python->kernel_switch) == nullptr;
}

bool same_modes(const Entry& entry) {
  if (c10::InferenceMode::is_enabled() != entry.inference_mode) return false;
  if (!entry.layer->is_neuron) return true;
  if (at::GradMode::is_enabled() != entry.grad_mode) return false;
  const auto type = entry.input.device.type();
  const bool autocast = at::autocast::is_autocast_enabled(type);
  return autocast == entry.autocast &&
      (!autocast || at::autocast::get_autocast_dtype(type) == entry.autocast_dtype);
}

// Fill `parameters` if the module and the input are those that the entry was made for.
bool matches(const Entry& entry, PyObject* module, PyObject* table, const Tensor& input,
             std::array<const Tensor*, 4>& parameters) {
  if (!entry.input.matches(input) || !same_modes(entry)) return false;
  for (const Setting& setting : entry.settings) {
    if (!setting.matches(module)) return false;
  }
  for (size_t i = 0; i < entry.names.size(); ++i) {  // borrowed, so no Python code may follow
    PyObject* found = PyDict_GetItemWithError(table, entry.names[i]);
    if (found == nullptr || !THPVariable_CheckExact(found)) return false;
    parameters[i] = &THPVariable_Unpack(found);
    if (!entry.parameters[i].matches(*parameters[i])) return false;
  }
  return true;
}

bool same_sums(const Entry& entry, const Tensor& map_sums) {
  return entry.map_sums ? entry.map_sums->matches(map_sums) : !map_sums.defined();
}

PyObject* run_entry(const Entry& entry, PyObject* input_object,
                    const std::array<const Tensor*, 4>& borrowed) {
  // Owned from here on: without the GIL, another thread may replace a parameter.
  const std::shared_ptr<Layer> layer = entry.layer;
  const Tensor input = THPVariable_Unpack(input_object);
  std::array<Tensor, 4> owned;
  std::array<const Tensor*, 4> parameters{};
  for (size_t i = 0; i < entry.names.size(); ++i) {
    owned[i] = *borrowed[i];
    parameters[i] = &owned[i];
  }
  const Stream stream(layer->device);
  if (stream.capturing || !stream.current) Py_RETURN_NONE;
  Tensor map_sums;
  if (layer->is_neuron && layer->derives_mean) {
    const bool kept = !entry.autocast || entry.autocast_dtype == input.scalar_type();
    if (kept) {
      py::object found = python->stored_sums(py::handle(input_object));
      if (!found.is_none()) map_sums = found.cast<Tensor>();
    }
    if (!same_sums(entry, map_sums)) Py_RETURN_NONE;
  }
  Outputs out;
  {
    py::gil_scoped_release no_gil;
    if (layer->is_neuron) {
      out = neuron_forward(layer, input, parameters, map_sums, stream);
    } else {
      out.y = norm_forward(layer, input, parameters, stream);
    }
  }
  ++counters.forward;
  py::object y = py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(out.y)));
  if (out.sums.defined()) python->store_sums(y, out.sums);
  if (!layer->is_neuron || !layer->pools) return y.release().ptr();
  auto index = py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(out.index)));
  return py::make_tuple(y, index).release().ptr();
}

// run(module, input): the output of the layer, or None where the Python path must run.
PyObject* run(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 2, "expected (module, input)");
  PyObject *module = arguments[0], *input_object = arguments[1];
  if (!THPVariable_CheckExact(input_object)) Py_RETURN_NONE;
  auto known = modules.find(module);
  if (known == modules.end() || known->second.entries.empty() || !is_eager() ||
      referent(known->second) != module) {
    Py_RETURN_NONE;
  }
  py::object table = py::reinterpret_steal<py::object>(PyObject_GetAttr(module, python->parameters));
  if (!table) throw python_error();
  if (!PyDict_Check(table.ptr())) Py_RETURN_NONE;
  const Tensor& input = THPVariable_Unpack(input_object);
  std::array<const Tensor*, 4> parameters{};
  auto& entries = known->second.entries;
  for (size_t i = 0; i < entries.size(); ++i) {
    const std::shared_ptr<Entry> entry = entries[i];  // another thread may add one meanwhile
    if (!matches(*entry, module, table.ptr(), input, parameters)) continue;
    PyObject* result = run_entry(*entry, input_object, parameters);
    if (result != Py_None) return result;
    Py_DECREF(result);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

void purge() {
  if (modules.size() < purge_at) return;
  for (auto it = modules.begin(); it != modules.end();) {
    it = referent(it->second) == it->first ? std::next(it) : modules.erase(it);
  }
  purge_at = std::max<size_t>(256, 2 * modules.size());
}

TensorState state_of(const Tensor& a) { return {Layout::of(a), a.key_set(), a.device()}; }

PyObject* interned(const py::handle& name) {
  PyObject* found = name.inc_ref().ptr();
  PyUnicode_InternInPlace(&found);
  return found;  // names are few and stay
}

// Whether `add` should be called for a module that the Python path has run. A module that is met
// for the first time is only remembered, since it may be a short-lived copy.
bool wants(const py::object& module, const Tensor& input, const std::optional<Tensor>& map_sums) {
  purge();
  auto [place, is_new] = modules.try_emplace(module.ptr());
  Module& known = place->second;
  if (is_new || referent(known) != module.ptr()) {
    known = Module{py::weakref(module)};
    return false;
  }
  py::object table = module.attr("_parameters");
  std::array<const Tensor*, 4> parameters{};
  if (known.adds_left <= 0) return false;
  for (size_t i = 0; i < known.entries.size(); ++i) {
    const std::shared_ptr<Entry> entry = known.entries[i];  // another thread may add one meanwhile
    if (same_sums(*entry, map_sums.value_or(Tensor())) &&
        matches(*entry, module.ptr(), table.ptr(), input, parameters)) {
      return false;  // there is one, which the present state keeps from running
    }
  }
  return true;
}

// Prepare a layer of a module for such an input; see __init__.py.
void add(const py::object& module, const Tensor& input, const py::dict& spec) {
  Module& known = modules.at(module.ptr());
  auto entry = std::make_shared<Entry>();
  entry->layer = std::make_shared<Layer>(spec);
  entry->input = state_of(input);
  for (auto item : py::reinterpret_borrow<py::dict>(spec["parameters"])) {
    entry->names.push_back(interned(item.first));
    entry->parameters.push_back(state_of(item.second.cast<Tensor>()));
  }
  TORCH_CHECK(entry->names.size() <= 4, "expected at most four parameters");
  for (auto item : py::reinterpret_borrow<py::dict>(spec["settings"])) {
    const bool is_list = PyList_Check(item.second.ptr());
    auto value = is_list ? py::object(py::tuple(py::reinterpret_borrow<py::object>(item.second)))
                         : py::reinterpret_borrow<py::object>(item.second);
    entry->settings.push_back({interned(item.first), value, is_list});
  }
  entry->inference_mode = c10::InferenceMode::is_enabled();
  entry->grad_mode = at::GradMode::is_enabled();
  const auto type = input.device().type();
  entry->autocast = at::autocast::is_autocast_enabled(type);
  entry->autocast_dtype = at::autocast::get_autocast_dtype(type);
  if (spec.contains("map_sums") && !spec["map_sums"].is_none()) {
    entry->map_sums = Layout::of(spec["map_sums"].cast<Tensor>());
  }
  --known.adds_left;
  if (known.entries.size() >= kMaxEntries) known.entries.erase(known.entries.begin());
  known.entries.push_back(std::move(entry));
}

void configure(const py::dict& given) {
  auto* found = new Python();
  found->compiler = py::object(given["compiler"]).release().ptr();
  found->forward_ad = py::object(given["forward_ad"]).release().ptr();
  found->environment = py::object(given["environment"]).release().ptr();
  found->kernel_switch = py::object(given["kernel_switch"]).release().ptr();
  found->describe = given["describe"];
  found->stored_sums = given["stored_sums"];
  found->store_sums = given["store_sums"];
  found->compiling = PyUnicode_InternFromString("_is_compiling_flag");
  found->exporting = PyUnicode_InternFromString("_is_exporting_flag");
  found->level = PyUnicode_InternFromString("_current_level");
  found->parameters = PyUnicode_InternFromString("_parameters");
  python = found;
}

py::dict count() {
  py::dict found;
  found["forward"] = counters.forward.load();
  found["backward"] = counters.backward.load();
  found["python_backward"] = counters.python_backward.load();
  found["python_steps"] = counters.python_steps.load();
  found["modules"] = modules.size();
  return found;
}

PyMethodDef run_method = {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&run)),
                          METH_FASTCALL, "run(module, input) -> output or None"};

PYBIND11_MODULE(_eager, m) {
  m.def("configure", &configure);
  m.def("wants", &wants);
  m.def("add", &add);
  m.def("clear", [] { modules.clear(); });
  m.def("count", &count);
  m.def("has_cuda", [] { return Driver::get().complete; });
  m.attr("run") = py::reinterpret_steal<py::object>(PyCFunction_New(&run_method, nullptr));
}

}  // namespace deepcontrol
