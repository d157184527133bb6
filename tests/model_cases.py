"""Models of every kind that has broken a recording tool, each with inputs: for tests that train them."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its inputs, and the rows that cannot have numbers: (module, site, tensor) to status.

    `oracle` makes the same model of modules that can be tapped.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    without: dict[tuple[str, str, str], str] = dataclasses.field(default_factory=dict)
    keywords: Callable[[], dict[str, Any]] = dict
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    oracle: Callable[[], nn.Module] | None = None


def numbers(*shape: int) -> Callable[[], tuple[torch.Tensor, ...]]:
    return lambda: (torch.randn(*shape),)


def leaves(value: Any) -> list[torch.Tensor]:
    """The tensors of an output that a loss can be made of."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() and value.numel() and not value.is_meta else []
    if isinstance(value, PackedSequence):
        return [value.data]
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, dict)):
        value = vars(value)
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for inner in value for leaf in leaves(inner)] if isinstance(value, (tuple, list)) else []


class Chain(nn.Module):
    """Named modules, run by a function."""

    def __init__(self, run: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: Any, **keywords: Any) -> Any:
        return self.run(self, *args, **keywords)


class Leaf(nn.Module):
    """A function as a childless module; `scale` gives it a parameter."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **keywords: Any) -> Any:
        return self.function(*args, **keywords)


def chain(run: Callable[..., Any], **modules: Any) -> Callable[[], nn.Module]:
    """Makes a chain; a module may be given as a function, or as (class, arguments)."""
    return lambda: Chain(
        run,
        **{
            n: m[0](*m[1:]) if isinstance(m, tuple) else m() if isinstance(m, type) else Leaf(m)
            for n, m in modules.items()
        },
    )


@dataclasses.dataclass
class Result:
    hidden: torch.Tensor
    deep: dict[str, torch.Tensor]


class Pair(NamedTuple):
    left: torch.Tensor
    right: list[torch.Tensor]


class Output(OrderedDict[str, Any]):
    """As transformers' ModelOutput: a mapping, and attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


LINEAR = (nn.Linear, 6, 6)


def _changed_in_place(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x)
    y += x
    z = m.b(m.relu(y))
    z.mul_(2).clamp_(min=-1)
    return m.c(z)  # type: ignore[no-any-return]


def _view_changed_in_place(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x).mul_(2)
    return m.b(m.flat(y).add_(3))  # type: ignore[no-any-return]


def _part_changed_in_place(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.part(m.a(x))
    y += 1
    return m.b(y)  # type: ignore[no-any-return]


def _one_of_two_changed(m: Any, x: torch.Tensor) -> torch.Tensor:
    left, right = m.split(m.a(x))
    right *= 2
    return m.b(left + right)  # type: ignore[no-any-return]


def _nested(x: torch.Tensor) -> Any:
    return x * 2, [x + 1, (x * x, {"last": x - 1})]


def _all_kinds(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x)
    nested, result, pair, mapping = m.nested(y), m.data(y), m.named(y), m.output(y)
    deep = nested[0] + nested[1][0] + nested[1][1][0] + nested[1][1][1]["last"]
    return deep + result.hidden * result.deep["a"] + pair.left + pair.right[0] + mapping.logits  # type: ignore[no-any-return]


def _odd_kinds(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x)
    indices, mask, spectrum, sparse = m.indices(y), m.mask(y), m.spectrum(y), m.sparse(y)
    m.empty(y), m.meta(y), m.jagged(y.detach()), m.quantized(y), m.nothing(y), m.text(y)
    return y.gather(1, indices) * mask + spectrum.real + sparse.to_dense()  # type: ignore[no-any-return]


def _packed(m: Any, x: torch.Tensor) -> Any:
    packed = pack_padded_sequence(x, torch.tensor([4, 3, 1]), batch_first=True)
    output, (hidden, _) = m.lstm(m.inner(packed))
    return output.data, hidden


def _by_keyword(m: Any, *, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return m.b(input=m.a(input=x) * scale)  # type: ignore[no-any-return]


def _several_times(m: Any, x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = m.norm(m.shared(x).tanh_())
    return m.head(x)  # type: ignore[no-any-return]


def _attention(m: Any, x: torch.Tensor) -> torch.Tensor:
    y, weights = m.attention(x, x, x)
    return m.head(y.relu_()) + weights.mean()  # type: ignore[no-any-return]


def _recurrent(m: Any, x: torch.Tensor) -> torch.Tensor:
    y, _ = m.lstm(x)
    z, h = m.gru(y)
    state = torch.zeros(x.shape[0], 6)
    for t in range(z.shape[1]):
        state = m.cell(z[:, t], state)
    return state + h[0]  # type: ignore[no-any-return]


def _embedded(m: Any, tokens: torch.Tensor) -> torch.Tensor:
    return m.head(m.embed(tokens).mean(1) + m.bag(tokens))  # type: ignore[no-any-return]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight
        self.again = self.body

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.again(self.body(self.embed(tokens))))  # type: ignore[no-any-return]


class Frozen(nn.Module):
    """A backbone in eval mode and without gradients inside a model in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).requires_grad_(False)
        self.head = nn.Linear(6, 3)

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))  # type: ignore[no-any-return]


class Half(nn.Module):
    """Computes in bfloat16 under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.body(x)  # type: ignore[no-any-return]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.norm(self.conv(x)))
        y = self.second(x)
        y += x
        return self.head(self.drop(self.pool(self.relu(y)).flatten(1)))  # type: ignore[no-any-return]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


def _parametrized() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(6, 6)),
        parametrizations.spectral_norm(nn.Linear(6, 6)),
        nn.utils.weight_norm(nn.Linear(6, 6)),  # the old way, by a hook
        parametrizations.orthogonal(nn.Linear(6, 6)),
    )


def _plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.ReLU()), nn.Linear(6, 3))


def _scripted() -> nn.Module:
    model: Any = _plain()
    model[1] = torch.jit.script(model[1])
    return model  # type: ignore[no-any-return]


def _quantized() -> nn.Module:
    """Its quantized front has no gradient: what comes before it gets none either."""
    front = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(6, 6)), {nn.Linear}, torch.qint8)
    return nn.Sequential(OrderedDict(front=front, head=nn.Linear(6, 3)))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=23, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )


def _tokens() -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, 9, (4, 5)),)


_GRAD = "activation_grad"

CASES: dict[str, Case] = {
    "in-place activations and adds": Case(
        chain(_changed_in_place, a=LINEAR, b=LINEAR, c=LINEAR, relu=(nn.ReLU, True)), numbers(5, 6)
    ),
    "full views changed in place": Case(
        chain(_view_changed_in_place, a=LINEAR, flat=(nn.Flatten,), b=(nn.Linear, 18, 3)),
        numbers(5, 3, 6),
        {("flat", _GRAD, ""): "view_modified"},
    ),
    "a part changed in place": Case(
        chain(_part_changed_in_place, a=LINEAR, part=lambda x: x[:, :4], b=(nn.Linear, 4, 3)),
        numbers(5, 6),
        {("part", _GRAD, ""): "view_modified"},
    ),
    "one of two parts changed in place": Case(
        chain(_one_of_two_changed, a=LINEAR, split=lambda x: (x[:, :3], x[:, 3:]), b=(nn.Linear, 3, 3)),
        numbers(5, 6),
        {("split", _GRAD, "0"): "view_modified", ("split", _GRAD, "1"): "view_modified"},
    ),
    "outputs of every nesting": Case(
        chain(
            _all_kinds,
            a=LINEAR,
            nested=_nested,
            data=lambda x: Result(x * 3, {"a": x.sigmoid()}),
            named=lambda x: Pair(x.exp(), [x.sin(), x.cos()]),
            output=lambda x: Output(logits=x * 5, loss=None),
        ),
        numbers(5, 6),
        {("named", _GRAD, "right.1"): "no_grad"},
    ),
    "outputs without numbers": Case(
        chain(
            _odd_kinds,
            a=LINEAR,
            indices=lambda x: x.argsort(1),
            mask=lambda x: x > 0,
            spectrum=torch.fft.fft,
            sparse=lambda x: (x * (x > 0)).to_sparse(),
            empty=lambda x: x[:0],
            meta=lambda x: torch.empty(3, device="meta"),
            jagged=lambda x: torch.nested.nested_tensor([x[0], x[1, :2]]),
            quantized=lambda x: torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.quint8),
            nothing=lambda x: None,
            text=lambda x: "text",
        ),
        numbers(5, 6),
        {
            ("indices", "activation", ""): "integer",
            ("mask", "activation", ""): "integer",
            ("spectrum", "activation", ""): "complex",
            ("empty", "activation", ""): "empty",
            ("empty", _GRAD, ""): "no_grad",
            ("meta", "activation", ""): "meta",
            ("meta", _GRAD, ""): "no_grad",
            ("jagged", "activation", ""): "unsupported",
            ("jagged", _GRAD, ""): "no_grad",
            ("quantized", "activation", ""): "unsupported",
        },
    ),
    "a packed sequence": Case(
        chain(
            _packed,
            inner=lambda p: PackedSequence(p.data * 2, p.batch_sizes),
            lstm=(nn.LSTM, 6, 4, 1, True, True),
        ),
        numbers(3, 4, 6),
        {("inner", _GRAD, "data"): "no_grad", ("lstm", _GRAD, "1.1"): "no_grad"},
    ),
    "inputs by keyword": Case(
        chain(_by_keyword, a=LINEAR, b=LINEAR), tuple, keywords=lambda: {"x": torch.randn(5, 6), "scale": 0.5}
    ),
    "a module called several times": Case(
        chain(_several_times, shared=LINEAR, norm=(nn.LayerNorm, 6), head=LINEAR), numbers(5, 6)
    ),
    "shared modules and tied weights": Case(Tied, _tokens),
    "a frozen backbone": Case(
        Frozen,
        numbers(5, 6),
        {
            ("backbone", _GRAD, ""): "no_grad",
            ("backbone.0", _GRAD, ""): "no_grad",
            ("backbone.1", _GRAD, ""): "no_grad",
        },
    ),
    "attention": Case(
        chain(
            _attention, attention=(nn.MultiheadAttention, 6, 2, 0.0, True, False, False, None, None, True), head=LINEAR
        ),
        numbers(3, 4, 6),
    ),
    "recurrent": Case(
        chain(
            _recurrent,
            lstm=(nn.LSTM, 6, 6, 1, True, True),
            gru=(nn.GRU, 6, 6, 2, True, True),
            cell=(nn.GRUCell, 6, 6),
        ),
        numbers(3, 4, 6),
        {("lstm", _GRAD, "1.0"): "no_grad", ("lstm", _GRAD, "1.1"): "no_grad"},
    ),
    "a transformer encoder": Case(
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(6, 2, 12, dropout=0.2, batch_first=True), 2, enable_nested_tensor=False
        ),
        numbers(3, 4, 6),
    ),
    "sparse embeddings": Case(
        chain(
            _embedded,
            embed=(nn.Embedding, 9, 6, None, None, 2.0, False, True),
            bag=(nn.EmbeddingBag, 9, 6, None, 2.0, False, "mean", True),
            head=LINEAR,
        ),
        _tokens,
    ),
    "normalisation in training mode": Case(
        lambda: nn.Sequential(
            nn.Conv2d(4, 4, 1),
            nn.BatchNorm2d(4),
            nn.InstanceNorm2d(4, affine=True),
            nn.GroupNorm(2, 4),
            nn.LayerNorm(3),
        ),
        numbers(5, 4, 3, 3),
    ),
    "lazy modules": Case(
        lambda: nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(3)),
        numbers(5, 2, 4, 4),
    ),
    "parametrizations": Case(_parametrized, numbers(5, 6)),
    "a scripted child": Case(
        _scripted,
        numbers(5, 6),
        {("1.0", "activation", ""): "not_called", ("1.1", "activation", ""): "not_called"},
        oracle=_plain,
    ),
    "a quantized child": Case(
        _quantized,
        numbers(5, 6),
        {("front", _GRAD, ""): "no_grad", ("front.0", _GRAD, ""): "no_grad"},
    ),
    "bfloat16 under autocast": Case(Half, numbers(5, 6)),
    "a residual network": Case(Residual, numbers(5, 2, 6, 6)),
    "a custom function": Case(
        chain(lambda m, x: m.b(Doubled.apply(m.twice(m.a(x)))), a=LINEAR, twice=Doubled.apply, b=LINEAR), numbers(5, 6)
    ),
    "numbers that are not finite": Case(
        chain(
            lambda m, x: m.b(m.bad(m.a(x)).nan_to_num(0.0, 1.0, -1.0)),
            a=LINEAR,
            bad=lambda x: x.detach() / x.detach().relu() + x,
            b=LINEAR,
        ),
        numbers(5, 6),
    ),
    "GPT-2": Case(_gpt2, _tokens, keywords=lambda: {"use_cache": False}),
}
