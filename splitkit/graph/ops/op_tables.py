"""Tables of the effects of torch's functions, methods and modules by name, found by running them.

Every entry of `LIES` was found by `tests/graph/ops` or by reading a kernel: the schema declares a fresh output (or no
write), but the op returns its input or a view of it, or writes. Numbers are argument positions; ``ALL`` means all.
"""

from __future__ import annotations

ALL: tuple[int, ...] = tuple(range(64))


def _words(text: str) -> list[str]:
    return text.split()


# Name in ATen (or "namespace::name") -> positions of arguments that an output may share memory with.
LIES: dict[str, tuple[int, ...]] = {
    # return their input when there is nothing to do
    **dict.fromkeys(
        _words(
            "_cast_Byte _cast_Char _cast_Double _cast_Float _cast_Half _cast_Int _cast_Long _cast_Short "
            "_to_cpu conj_physical lift sum_to_size _sparse_sum to_dense to_sparse to_sparse_bsc "
            "to_sparse_bsr to_sparse_csc to_sparse_csr _to_dense _to_sparse _to_sparse_bsc _to_sparse_bsr "
            "_to_sparse_csc _to_sparse_csr to_mkldnn chalf type_as _rowwise_prune _remove_batch_dim "
            "_add_batch_dim _saturate_weight_to_fp16"
        ),
        (0,),
    ),
    **dict.fromkeys(("prims::device_put", "prims::convert_element_type", "prims::view_of"), (0,)),
    "_c10d_functional::wait_tensor": (0,),
    "_c10d_functional_autograd::wait_tensor": (0,),
    # views without an annotation
    **dict.fromkeys(
        _words(
            "_unsafe_view unsafe_chunk unsafe_split unsafe_split_with_sizes data _reshape_from_tensor "
            "to_dense_backward to_mkldnn_backward"
        ),
        (0,),
    ),
    **dict.fromkeys(
        _words(
            "atleast_1d atleast_2d atleast_3d broadcast_tensors meshgrid cartesian_prod chain_matmul "
            "unflatten_dense_tensors flatten_dense_tensors align_tensors histogramdd set_ set_data "
            "sparse_coo_tensor sparse_csr_tensor sparse_csc_tensor sparse_bsr_tensor sparse_bsc_tensor "
            "sparse_compressed_tensor _sparse_coo_tensor_unsafe _sparse_csr_tensor_unsafe "
            "_sparse_csc_tensor_unsafe _sparse_bsr_tensor_unsafe _sparse_bsc_tensor_unsafe "
            "_sparse_compressed_tensor_unsafe _sparse_coo_tensor_with_dims_and_tensors "
            "_sparse_compressed_tensor_with_dims_and_tensors _cudnn_rnn _cudnn_rnn_flatten_weight"
        ),
        ALL,
    ),
}
# Arguments that are written although the schema does not say so (running statistics have a rule of their own).
LIES_WRITE: dict[str, tuple[int, ...]] = {"_cudnn_rnn_flatten_weight": (0,)}

DROPOUTS = frozenset(
    f"{name}{end}"
    for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
    for end in ("", "_")
) | {"dropout1d", "dropout2d", "dropout3d"}
RNNS = frozenset(_words("lstm gru rnn_tanh rnn_relu quantized_lstm quantized_gru _cudnn_rnn miopen_rnn"))
RRELUS = frozenset(_words("rrelu rrelu_ rrelu_with_noise rrelu_with_noise_ rrelu_with_noise_functional"))
# Random ops by name, for versions of torch in which they lack the tag or the Generator argument.
RANDOM = frozenset(_words("_cudnn_init_dropout_state _fused_dropout inductor_seed inductor_seeds inductor_lookup_seed"))
COLLECTIVES = frozenset(_words("c10d c10d_functional _c10d_functional _c10d_functional_autograd symm_mem"))

# Python functions of torch.nn.functional and torch without an ATen packet of their name; fresh outputs, no effect but
# `inplace=` and what `rules` says. The value: do they yield a tuple?
FUNCTIONS: dict[str, bool] = {
    **dict.fromkeys(
        _words(
            "_threshold interpolate upsample upsample_bilinear upsample_nearest unique affine_grid cross_entropy "
            "dropout1d dropout2d dropout3d fold gaussian_nll_loss grid_sample grouped_mm gumbel_softmax "
            "linear_cross_entropy local_response_norm logsigmoid lp_pool1d lp_pool2d lp_pool3d max_unpool1d "
            "multilabel_soft_margin_loss normalize scaled_grouped_mm scaled_mm softmin softsign tanhshrink "
            "triplet_margin_with_distance_loss tensor new_tensor is_tensor is_storage is_grad_enabled "
            "is_inference_mode_enabled is_autocast_enabled is_autocast_cpu_enabled get_autocast_dtype "
            "get_autocast_cpu_dtype get_autocast_gpu_dtype get_default_dtype get_default_device "
            "get_float32_matmul_precision are_deterministic_algorithms_enabled compiled_with_cxx11_abi "
            "typename sym_float sym_int sym_ite sym_max sym_min sym_not sym_sqrt sym_sum _sym_sqrt _sym_cos "
            "_sym_cosh _sym_sin _sym_sinh _sym_tan _sym_tanh _sym_asin _sym_acos _sym_atan _sym_log2 "
            "sym_fresh_size has_torch_function has_torch_function_unary has_torch_function_variadic __abs__ "
            "__add__ __sub__ __mul__ __matmul__ __mod__ __pow__ __truediv__ __floordiv__ __div__ __neg__ "
            "__invert__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __radd__ __rsub__ __rmul__ __rmatmul__ "
            "__rmod__ __rpow__ __rtruediv__ __rdiv__ __rfloordiv__ __rand__ __ror__ __rxor__ __rlshift__ "
            "__rrshift__ __bool__ __complex__ __contains__ __float__ __format__ __hash__ __index__ __int__ "
            "__len__ __long__ __nonzero__ __repr__ __str__ __sizeof__ __reversed__ __deepcopy__ "
            "const_data_ptr data_ptr dim element_size is_shared nelement ndimension numel storage_type"
        ),
        False,
    ),
    **dict.fromkeys(
        _words(
            "multi_head_attention_forward unravel_index broadcast_shapes dim_order max_pool1d_with_indices "
            "max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool1d_with_indices "
            "adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices "
            "fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices"
        ),
        True,
    ),
}
# The same for functions whose output may be (a view of) their first argument; `tolist` depends on the dimensions.
ALIASING: dict[str, bool | None] = {
    **dict.fromkeys(
        _words(
            "as_tensor asarray from_numpy from_dlpack to_dlpack frombuffer __array__ __getitem__ __pos__ "
            "__dlpack__ __array_wrap__ as_subclass bfloat16 bool byte cdouble cfloat char cpu cuda "
            "double float half int ipu long mtia short xpu to_sparse_coo numpy type untyped_storage "
            "storage _typed_storage new pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle"
        ),
        False,
    ),
    **dict.fromkeys(("lu", "__iter__"), True),
    "tolist": None,
}
IN_PLACE_METHODS = frozenset(
    _words(
        "__setitem__ __delitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __idiv__ __imod__ "
        "__ipow__ __iand__ __ior__ __ixor__ __ilshift__ __irshift__ share_memory_"
    )
)
# Methods that call a given function, or make autograd call it.
CALLS_BACK = frozenset(_words("register_hook register_post_accumulate_grad_hook apply_ map_ map2_"))
PURE_BUILTINS = frozenset(
    _words(
        "abs all any bool callable complex divmod float format hasattr hash id int isinstance issubclass "
        "len pow range repr round str type"
    )
)
CHECKS = frozenset(
    _words(
        "_assert _check _check_index _check_is_size _check_not_implemented _check_tensor_all "
        "_check_tensor_all_with _check_type _check_value _check_with _constrain_as_size"
    )
)
GENERATOR_STATE = frozenset(
    _words(
        "manual_seed manual_seed_all seed seed_all initial_seed get_rng_state get_rng_state_all "
        "set_rng_state set_rng_state_all"
    )
)
# Change the state in which later nodes run, besides torch's functions whose names say so (see `ambient`).
AMBIENT = frozenset(
    _words(
        "use_deterministic_algorithms clear_autocast_cache synchronize _sdpa_kernel _sdpa_kernel_variadic stream "
        "__enter__ __exit__ wait_stream wait_event backward"
    )
)
# Functions of functorch that put a tensor on the level of a vmap, or take it off. They change no level.
BATCHED_VIEWS = frozenset(("_add_batch_dim", "_remove_batch_dim"))  # 2.11, 2.13, 2.15
# Methods of lists, dicts and sets that change nothing.
CONTAINER_READS = frozenset(
    _words(
        "index count keys values items get copy numel union intersection difference symmetric_difference isdisjoint "
        "issubset issuperset __add__ __radd__ __mul__ __rmul__ __or__ __and__ __sub__ __xor__ __getitem__ __contains__ "
        "__len__ __iter__ __reversed__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __hash__ __bool__ __repr__ __str__"
    )
)
# Namespaces of operators whose tags can be trusted to say what is random: torch's own and torchvision's.
TRUSTED = COLLECTIVES | frozenset(
    _words(
        "aten prim prims prepacked quantized _quantized quantization onednn mkldnn mkldnn_prepacked mkl xnnpack sparse "
        "profiler streams inductor inductor_prims rngprims debugprims fsdp static_runtime onnx onnx_symbolic export "
        "flex_lib debug_mode_ops higher_order _dtensor _native torchvision"
    )
)
TORCH_MODULES = frozenset(
    _words(
        "torch torch._C torch._tensor torch._VF torch.functional torch.linalg torch.fft torch.special "
        "torch.random torch.cuda.random torch.nn.functional torch.sparse torch.nested torch._C._nn "
        "torch._C._linalg torch._C._fft torch._C._special torch._C._sparse torch._C._nested "
        "torch.amp.autocast_mode torch.fx.experimental.symbolic_shapes torch._C._VariableFunctions "
        "torch._functorch.predispatch torch._C._functorch"
    )
)
# Functions, methods and operators -> the arguments of which they read the size, dtype or device, and no memory.
SIZES_OF: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(
        _words(
            "empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty new_empty_strided "
            "new_zeros new_ones new_full new_tensor size stride dim ndimension numel nelement element_size "
            "storage_offset is_contiguous is_floating_point is_complex is_signed get_device sym_size sym_stride "
            "sym_numel sym_storage_offset sym_is_contiguous dim_order"
        ),
        (0,),
    ),
    **dict.fromkeys(_words("expand_as view_as reshape_as type_as resize_as_ to"), (1,)),
    **dict.fromkeys(_words("is_same_size result_type"), (0, 1)),
}
SIZE_ATTRIBUTES = frozenset(_words("shape dtype device layout ndim itemsize nbytes is_cuda is_cpu is_meta is_sparse"))
# Functions, methods and operators that refer to the memory of their first argument (if strided), and never copy it.
VIEWS = frozenset(
    _words(
        "alias as_strided chunk detach diagonal expand expand_as hsplit vsplit dsplit mH mT matrix_H movedim moveaxis "
        "narrow numpy_T permute select slice split split_with_sizes squeeze swapaxes swapdims t transpose unbind "
        "unflatten unfold unsqueeze view view_as view_as_real view_as_complex _reshape_alias _unsafe_view unsafe_chunk "
        "unsafe_split unsafe_split_with_sizes"
    )
)
VIEW_ATTRIBUTES = frozenset(_words("T mT data"))
# Operators that change the size of what they write, besides those that torch tags as in-place views.
RESIZES = frozenset(
    _words(
        "_resize_output_ set_data copy_sparse_to_sparse_ resize_as_sparse_ sparse_resize_ sparse_resize_and_clear_ "
        "rename_ _coalesced_"
    )
)
# Methods that work in place on arrays and lists, but only compute on tensors.
IN_PLACE_ELSEWHERE = frozenset(_words("sort put resize"))
# Methods that numpy's arrays share with tensors -> how many arguments stand before `out`, which is written.
OUT_AFTER: dict[str, int] = {
    **dict.fromkeys(_words("all any argmax argmin dot max min round"), 1),
    **dict.fromkeys(_words("clip cumprod cumsum mean prod std sum take var"), 2),
    "trace": 4,
}
# Functions and methods whose result is not a tensor, but shares its memory or its methods' names.
MAKE_FOREIGN = frozenset(_words("numpy __array__ tolist __dlpack__ to_dlpack"))
# Attributes of a tensor that are not a tuple (`shape` is).
SINGLE_ATTRIBUTES = frozenset(_words("dtype device layout ndim T mT H mH real imag data grad requires_grad is_cuda"))
# Functions that yield a tuple if one of these arguments is true: its name, its position (-1: by keyword only).
TUPLE_IF: dict[str, tuple[tuple[str, int], ...]] = {
    **dict.fromkeys(("max_pool1d", "max_pool2d", "max_pool3d"), (("return_indices", 6),)),
    **dict.fromkeys(("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"), (("return_indices", 2),)),
    **dict.fromkeys(("fractional_max_pool2d", "fractional_max_pool3d"), (("return_indices", 4),)),
    "unique": (("return_inverse", 2), ("return_counts", 3)),
    "unique_consecutive": (("return_inverse", 1), ("return_counts", 2)),
    "nonzero": (("as_tuple", -1),),
}

# Classes of torch.nn that compute fresh outputs and have no effect beyond what `modules` says (training, inplace...).
FRESH_MODULES = frozenset(
    _words(
        "AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveLogSoftmaxWithLoss "
        "AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d AvgPool1d AvgPool2d AvgPool3d BCELoss "
        "BCEWithLogitsLoss BatchNorm1d BatchNorm2d BatchNorm3d SyncBatchNorm Bilinear CELU CTCLoss "
        "CircularPad1d CircularPad2d CircularPad3d Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d "
        "ConvTranspose3d CosineEmbeddingLoss CosineSimilarity CrossEntropyLoss CrossMapLRN2d ELU "
        "Embedding EmbeddingBag Fold FractionalMaxPool2d FractionalMaxPool3d GELU GLU GRU GRUCell "
        "GaussianNLLLoss GroupNorm Hardshrink Hardsigmoid Hardswish Hardtanh HingeEmbeddingLoss HuberLoss "
        "InstanceNorm1d InstanceNorm2d InstanceNorm3d KLDivLoss L1Loss LPPool1d LPPool2d LPPool3d LSTM "
        "LSTMCell LayerNorm LeakyReLU Linear NonDynamicallyQuantizableLinear LocalResponseNorm LogSigmoid "
        "LogSoftmax MSELoss MarginRankingLoss MaxPool1d MaxPool2d MaxPool3d MaxUnpool1d MaxUnpool2d "
        "MaxUnpool3d Mish MultiLabelMarginLoss MultiLabelSoftMarginLoss MultiMarginLoss "
        "MultiheadAttention NLLLoss NLLLoss2d PReLU PairwiseDistance PoissonNLLLoss RMSNorm RNN RNNCell "
        "RReLU ReLU ReLU6 SELU SiLU Sigmoid SmoothL1Loss SoftMarginLoss Softmax Softmax2d Softmin "
        "Softplus Softshrink Softsign Tanh Tanhshrink Threshold TripletMarginLoss Unfold Upsample "
        "UpsamplingBilinear2d UpsamplingNearest2d ConstantPad1d ConstantPad2d ConstantPad3d "
        "ReflectionPad1d ReflectionPad2d ReflectionPad3d ReplicationPad1d ReplicationPad2d "
        "ReplicationPad3d ZeroPad1d ZeroPad2d ZeroPad3d"
    )
)
# Classes whose output may be their input or a view of it.
ALIAS_MODULES = frozenset(
    _words(
        "ChannelShuffle Flatten Identity PixelShuffle PixelUnshuffle Transformer TransformerDecoder "
        "TransformerDecoderLayer TransformerEncoder TransformerEncoderLayer Unflatten"
    )
)
DROPOUT_MODULES = frozenset(_words("Dropout Dropout1d Dropout2d Dropout3d AlphaDropout FeatureAlphaDropout"))
TUPLE_MODULES = frozenset(_words("GRU LSTM LSTMCell RNN MultiheadAttention AdaptiveLogSoftmaxWithLoss"))
# Higher-order operators that run their body once on their operands and return what it returns.
WRAPPERS = frozenset(
    _words(
        "wrap wrap_with_set_grad_enabled wrap_with_autocast wrap_activation_checkpoint "
        "tag_activation_checkpoint invoke_subgraph hints_wrapper cond strict_mode"
    )
)

# Operators of other namespaces that were read, and draw no random numbers: matrix products of transformers' experts.
READ = frozenset(_words("transformers::grouped_mm_fallback transformers::grouped_mm_fallback_backward"))
# The torch.autograd.Function that export calls for a lookup in a mask or score of FlexAttention: 2.11, 2.13, 2.15.
LOOKUP = "torch._dynamo._trace_wrapped_higher_order_op.ModIndex"
