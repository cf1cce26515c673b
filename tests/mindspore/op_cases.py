"""The operator calls that are checked, by theme: MindSpore's spellings of each family. Run in the workers only."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, mint, nn, ops

from tests.mindspore.op_checks import Case, check, mesh_of

# fmt: off
ELEMENTWISE = {
    "neg": Case(lambda x: -x, "f5,3", ("S0", "S1", "P")),
    "exp": Case(lambda x: ops.exp(x), "f5,3", ("S0", "P")),
    "silu": Case(lambda x: ops.silu(x), "f5,3", ("S1", "P")),
    "gelu": Case(lambda x: ops.gelu(x), "f5,3", ("S1", "P")),
    "relu": Case(lambda x: mint.nn.functional.relu(x), "f5,3", ("S1",)),
    "rsqrt": Case(lambda x: mint.rsqrt(x), "p5,3", ("S1",)),
    "sigmoid": Case(lambda x: mint.sigmoid(x), "f5,3", ("S1",)),
    "add": Case(lambda x, y: x + y, "f5,3 f5,3", ("S0 S0", "S0 R", "R S0", "P P", "P R", "R T", "T R"),
                ("S0 S1", "S0 T", "T S0")),
    "add_functions": Case(lambda x, y: ops.add(x, y) + mint.add(x, y, alpha=2), "f5,3 f5,3", ("S0 S0", "P R", "T R")),
    "add_bias": Case(lambda x, y: x + y, "f4,5,3 f3", ("S0 R", "S0 T", "S2 S0", "P R", "P P"), ("S2 T", "S0 S0")),
    "add_number": Case(lambda x: x + 1.5, "f5,3", ("P", "S0")),
    "radd_number": Case(lambda x: 1.5 + x, "f5,3", ("P", "S0")),
    "sub_number": Case(lambda x: x - 2, "f5,3", ("P", "S0")),
    "rsub_number": Case(lambda x: 2 - x, "f5,3", ("P", "S0")),
    "sub": Case(lambda x, y: x - y, "f5,3 f5,3", ("P R", "R P", "S0 P", "T R")),
    "mul": Case(lambda x, y: x * y, "f5,3 f5,3", ("P R", "R P", "P P", "S0 P", "S0 R", "T R")),
    "mul_number": Case(lambda x: 2.5 * x, "f5,3", ("P", "S0")),
    "div": Case(lambda x, y: x / y, "f5,3 p5,3", ("P R", "R P", "S0 R", "T R")),
    "div_number": Case(lambda x: x / 3, "f5,3", ("P", "S1")),
    "rdiv_number": Case(lambda x: 3 / x, "p5,3", ("P", "S1")),
    "pow": Case(lambda x: x**2, "f5,3", ("P", "S1")),
    "rpow": Case(lambda x: 2**x, "f5,3", ("P", "S1")),
    "abs": Case(lambda x: abs(x), "f5,3", ("P", "S1")),
    "maximum": Case(lambda x, y: ops.maximum(x, y), "f5,3 f5,3", ("P R", "S0 R", "P P")),
    "compare": Case(lambda x, y: [x > y, x >= 0.1, x == y, x != 1, x < y], "f5,3 f5,3", ("P R", "S0 R"),
                    gradients=False),
    "logic": Case(lambda x, y: [x & y, x | y, ~x, ops.logical_xor(x, y)], "b5,3 b5,3", ("S0 R", "S0 S0"),
                  gradients=False),
    "where": Case(lambda c, x, y: ops.where(c, x, y), "b5,3 f5,3 f5,3", ("S0 R R", "R S1 P", "R P P")),
    "where_number": Case(lambda c, x: mint.where(c, x, 0.0), "b5,3 f5,3", ("S0 R", "S1 S1")),
    "masked_fill": Case(lambda x, m: x.masked_fill(m, 2.0), "f5,3 b5,1", ("S0 R", "P R"), ("S0 T",)),
    "clamp": Case(lambda x: ops.clamp(x, -0.5, 0.5), "f5,3", ("S0", "P")),
    "cast": Case(lambda x: x.astype(mindspore.float64), "f5,3", ("S0", "P")),
    "cast_function": Case(lambda x: ops.cast(x, mindspore.float64), "f5,3", ("S0", "P")),
    "stop_gradient": Case(lambda x: ops.stop_gradient(x) * x, "f5,3", ("S0", "P")),
    "iadd": Case(lambda x, y: x.__iadd__(y), "f5,3 f5,3", ("S0 S0", "P P")),
    "addn": Case(lambda x, y: ops.addn([x, y]), "f5,3 f5,3", ("S0 S0", "S0 R", "P P"), ("S0 S1",)),
}

REDUCTIONS = {
    "sum": Case(lambda x: x.sum(), "f5,3", ("S0", "S1", "P", "R")),
    "sum_dim": Case(lambda x: x.sum(1), "f5,3", ("S0", "S1", "P")),
    "sum_axis": Case(lambda x: x.sum(axis=1, keepdims=True), "f5,3", ("S0", "S1", "P")),
    "sum_function": Case(lambda x: ops.sum(x, 0) + mint.sum(x, 0), "f5,3", ("S0", "S1", "P")),
    "ReduceSum": Case(lambda x: ops.ReduceSum(True)(x, 0), "f5,3", ("S0", "S1", "P")),
    "mean": Case(lambda x: x.mean(), "f5,3", ("S0", "S1", "P")),
    "mean_dims": Case(lambda x: ops.mean(x, (0, 2)), "f5,3,2", ("S0", "S1", "S2", "P")),
    "mean_keepdim": Case(lambda x: x.mean(-1, True), "f5,3", ("S0", "S1")),
    "max": Case(lambda x: x.max(), "f5,3", ("S0", "P"), gradients=False),
    "amax": Case(lambda x: mint.amax(x, 1), "f5,3", ("S0", "S1"), gradients=False),
    "max_dim": Case(lambda x: x.max(1)[0], "f5,3", ("S0",), ("S1",)),
    "argmax": Case(lambda x: x.argmax(1), "f5,7", ("S0", "S1"), gradients=False),
    "argmax_function": Case(lambda x: ops.argmax(x, 1), "f5,7", ("S0", "S1"), gradients=False),
    "all": Case(lambda x: x.all(), "b5,3", ("S0", "R"), gradients=False),
    "any": Case(lambda x: x.any(1), "b5,3", ("S0", "S1"), gradients=False),
    "prod": Case(lambda x: x.prod(1), "p5,3", ("S0",), ("S1",)),
    "norm": Case(lambda x: ops.norm(x), "f5,3", ("S0", "S1")),
    "logsumexp": Case(lambda x: ops.logsumexp(x, 1), "f5,3", ("S0",)),
    "softmax": Case(lambda x: ops.softmax(x, -1), "f5,3", ("S0", "P"), ("S1",)),
    "softmax_mint": Case(lambda x: mint.nn.functional.softmax(x, dim=0), "f5,3", ("S1",), ("S0",)),
    "log_softmax": Case(lambda x: ops.log_softmax(x, -1), "f5,3", ("S0", "P"), ("S1",), gradients=False),
    "cumsum": Case(lambda x: ops.cumsum(x, 1), "f5,3", ("S0", "P"), ("S1",)),
    "topk": Case(lambda x: ops.topk(x, 2), "f5,3", ("S0",), ("S1",), gradients=False),
    "argsort": Case(lambda x: ops.argsort(x), "f5,3", ("S0",), ("S1",), gradients=False),
    "flip": Case(lambda x: mint.flip(x, (1,)), "f5,3", ("S0", "P"), ("S1",)),
    "triu": Case(lambda x: ops.triu(x), "f5,4", ("S0", "S1", "P")),
    "tril": Case(lambda x: ops.tril(x, 1) + x.tril(), "f5,4", ("S0", "S1", "P")),
    "layer_norm": Case(lambda x: nn.LayerNorm((6,))(x), "f4,6", ("S0",), ("S1",)),
}

MATMUL = {
    "matmul": Case(lambda x, y: ops.matmul(x, y), "f5,6 f6,4", ("R S1", "S1 S0", "S0 R", "P R", "R P", "S0 T", "T S1"),
                   ("S1 S1",)),
    "operator": Case(lambda x, y: x @ y, "f5,6 f6,4", ("R S1", "S1 S0", "T R")),
    "mint_3d": Case(lambda x, y: mint.matmul(x, y), "f2,5,6 f6,4", ("S0 R", "S2 S0", "R S1")),
    "MatMul_b": Case(lambda x, y: ops.MatMul(transpose_b=True)(x, y), "f5,6 f4,6", ("R S0", "S1 S1", "S0 R")),
    "MatMul_a": Case(lambda x, y: ops.MatMul(transpose_a=True)(x, y), "f6,5 f6,4", ("R S1", "S0 S0", "S1 R")),
    "bmm": Case(lambda x, y: ops.bmm(x, y), "f3,5,6 f3,6,4", ("S0 S0", "S2 S1", "R S2")),
    "BatchMatMul_b": Case(lambda x, y: ops.BatchMatMul(transpose_b=True)(x, y), "f3,5,6 f3,4,6", ("S0 S0", "S2 S2")),
    "dense": Case(lambda x, w: ops.dense(x, w), "f5,6 f4,6", ("R S0", "S1 S1", "S0 R", "P R")),
    "dense_bias": Case(lambda x, w, b: ops.dense(x, w, b), "f5,6 f4,6 f4", ("R S0 S0", "S1 S1 R", "S1 S1 T", "S0 R R")),
    "linear": Case(lambda x, w: mint.nn.functional.linear(x, w), "f2,5,6 f4,6", ("R S0", "S2 S1")),
    "bias_add": Case(lambda x, b: ops.BiasAdd()(x, b), "f5,6 f6", ("S0 R", "S1 S0", "P P")),
}

VIEWS = {
    "reshape": Case(lambda x: x.reshape(2, 2, 6), "f4,6", ("S0", "P")),
    "reshape_join": Case(lambda x: ops.reshape(x, (8, 3)), "f4,2,3", ("S0", "S2", "P"), ("S1",)),
    "view": Case(lambda x: x.view((4, 3, 2)), "f4,6", ("S0", "P")),
    "flatten": Case(lambda x: mint.flatten(x), "f4,6", ("S0", "P")),
    "ops_flatten": Case(lambda x: ops.flatten(x), "f4,2,3", ("S0", "P")),
    "T": Case(lambda x: x.T, "f5,3", ("S0", "S1", "P")),
    "transpose": Case(lambda x: mint.transpose(x, 0, 2), "f5,3,2", ("S0", "S1", "S2", "P")),
    "permute": Case(lambda x: ops.transpose(x, (2, 0, 1)), "f5,3,2", ("S0", "S1", "S2", "P")),
    "swapaxes": Case(lambda x: x.swapaxes(0, 1), "f5,3", ("S0", "S1", "P")),
    "unsqueeze": Case(lambda x: x.unsqueeze(1), "f5,3", ("S0", "S1", "P")),
    "expand_dims": Case(lambda x: ops.expand_dims(x, 0), "f5,3", ("S0", "S1", "P")),
    "squeeze": Case(lambda x: x.squeeze(1), "f5,1,3", ("S0", "S2", "P")),
    "expand": Case(lambda x: x.expand(2, 5, 3), "f5,1", ("S0", "P"), gradients=False),
    "broadcast_to": Case(lambda x: ops.broadcast_to(x, (2, 5, 3)), "f5,3", ("S0", "S1", "P")),
    "tile": Case(lambda x: ops.tile(x, (1, 2)), "f5,3", ("S0", "P"), ("S1",)),
    "getitem": Case(lambda x: x[:, 1:3], "f5,4", ("S0", "P"), ("S1",)),
    "getitem_int": Case(lambda x: x[2], "f5,4", ("S1", "P"), ("S0",)),
    "getitem_none": Case(lambda x: x[:, None, ..., 0], "f5,4", ("S0", "P"), ("S1",)),
    "getitem_tensor": Case(lambda x, i: x[:, i], "f5,4 i3<4", ("S0 R", "S0 T", "R S0"), ("S1 R",)),
    "iterate": Case(lambda x: list(x), "f2,4", ("S1", "P"), ("S0",)),
    "narrow": Case(lambda x: ops.narrow(x, 1, 1, 2), "f5,4", ("S0", "P"), ("S1",)),
    "narrow_method": Case(lambda x: x.narrow(1, 1, 2), "f5,4", ("S0", "P"), ("S1",)),
    "split": Case(lambda x: ops.split(x, 2, 1), "f5,4", ("S0", "P"), ("S1",)),
    "split_mint": Case(lambda x: mint.split(x, [1, 3], 1), "f5,4", ("S0", "P"), ("S1",)),
    "chunk": Case(lambda x: x.chunk(2, 1), "f5,4", ("S0", "P"), ("S1",)),
    "unbind": Case(lambda x: ops.unbind(x, 1), "f5,3", ("S0", "P"), ("S1",)),
    "concat": Case(lambda x, y: ops.concat([x, y], 1), "f5,3 f5,2", ("S0 S0", "P P", "P R"), ("S1 S1",)),
    "concat_mint": Case(lambda x, y: mint.cat((x, y), 0), "f5,3 f2,3", ("S1 S1", "S1 R"), ("S0 R",)),
    "stack": Case(lambda x, y: ops.stack([x, y], 1), "f5,3 f5,3", ("S0 S0", "P P", "S1 R")),
    "zeros_like": Case(lambda x: [ops.zeros_like(x), ops.ones_like(x)], "f5,3", ("S0", "P"), gradients=False),
    "one_hot": Case(lambda i: ops.one_hot(i, 7, Tensor(1.0), Tensor(0.0)), "i5,3<7", ("S0", "S1"),
                    gradients=False),
}

LOOKUP = {
    "gather_rows": Case(lambda e, i: ops.gather(e, i, 0), "f7,3 i2,4<7",
                        ("S0 R", "S1 R", "R S0", "S0 T", "T R", "P R")),
    "gather_columns": Case(lambda e, i: ops.gather(e, i, 1), "f3,7 i4<7", ("S0 R", "S1 R", "R S0")),
    "gather_elements": Case(lambda x, i: ops.gather_elements(x, 1, i), "f5,7 i5,2<7", ("S0 S0", "S1 R", "R S1", "P R")),
    "nn.Embedding": Case(lambda i: nn.Embedding(7, 3, embedding_table=Tensor(np.ones((7, 3), np.float32)))(i), "i4,2<7",
                         ("S0",), gradients=False),
}
# fmt: on

THEMES = {
    "elementwise": ELEMENTWISE,
    "reductions": REDUCTIONS,
    "matmul": MATMUL,
    "views": VIEWS,
    "lookup": LOOKUP,
}


def check_theme(theme: str, mesh_shape: tuple[int, ...]) -> dict[str, Any]:
    """Every case of a theme on one mesh."""
    total: dict[str, Any] = {}
    for name, case in THEMES[theme].items():
        total[name] = dict(check(case, name, mesh_of(mesh_shape)))
    return total
