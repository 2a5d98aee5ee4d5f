"""The models of generated projects: weights from nothing, shapes, sums, and that they learn."""

import math

import pytest
import torch
from torch import nn

import parts

SIZES = {
    "mlp": {"features": 6, "outputs": 3},
    "resnet": {"channels": 3, "image_size": 16, "classes": 5},
    "vit": {"channels": 3, "image_size": 16, "classes": 5},
    "gpt": {"vocab_size": 11, "context": 12},
}
SYNTHETIC = {"mlp": "tabular", "resnet": "image", "vit": "image", "gpt": "text"}
VARIANTS = [
    ("mlp", {}),
    ("mlp", {"norm": "none"}),
    ("resnet", {}),
    ("resnet", {"name": "resnet50", "stem": "imagenet", "zero_init_residual": False}),
    ("vit", {}),
    ("gpt", {}),
    ("gpt", {"tied": False}),
]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def part(model):
    return parts.load(model, f"synthetic_{SYNTHETIC[model]}").model


def batch(model, size=4):
    """Random inputs and targets for SIZES."""
    rng = torch.Generator().manual_seed(0)
    if model == "mlp":
        return [torch.randn(size, 6, generator=rng), torch.randint(3, (size,), generator=rng)]
    if model == "gpt":
        tokens = torch.randint(11, (size, 13), generator=rng)
        return [tokens[:, :-1], tokens[:, 1:].clone()]
    return [torch.randn(size, 3, 16, 16, generator=rng), torch.randint(5, (size,), generator=rng)]


@pytest.mark.parametrize(("model", "config"), VARIANTS)
def test_initialise_reaches_every_parameter_and_buffer(model, config):
    code = part(model)
    first = parts.new_model(code, SIZES[model], **config)
    again = parts.new_model(code, SIZES[model], **config)
    other = parts.new_model(code, SIZES[model], seed=1, **config)
    tensors = dict([*first.named_parameters(), *first.named_buffers()])
    twice = dict([*again.named_parameters(), *again.named_buffers()])
    for name, tensor in tensors.items():
        assert torch.isfinite(tensor).all(), name
        assert (tensor != -12345).all(), name
        assert torch.equal(tensor, twice[name]), name
    changed = [
        name
        for name, p in other.named_parameters()
        if not torch.equal(p, first.get_parameter(name))
    ]
    random = [name for name, p in first.named_parameters() if p.dim() > 1]
    assert set(random) <= set(changed)


@pytest.mark.parametrize("model", parts.MODELS)
def test_a_module_that_initialise_does_not_know_is_an_error(model):
    class Unknown(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

    with pytest.raises(NotImplementedError, match=r"layer\.x"):
        part(model).initialise("layer.x", Unknown())
    part(model).initialise("layer.y", nn.Sequential())  # nothing to initialise


def test_resnet_starts_as_torchvisions_does():
    import torchvision

    torch.manual_seed(0)
    theirs = torchvision.models.resnet18(num_classes=5, zero_init_residual=True)
    mine = parts.new_model(part("resnet"), SIZES["resnet"], stem="imagenet")
    assert mine.state_dict().keys() == theirs.state_dict().keys()
    for (name, a), b in zip(mine.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert a.shape == b.shape, name
        if a.dtype == torch.float32 and a.numel() > 1000:
            assert a.std().item() == pytest.approx(b.std().item(), rel=0.1, abs=1e-9), name
        else:
            assert a.float().mean().item() == pytest.approx(b.float().mean().item(), abs=0.05), name


def test_gpt_scales_weights_by_inputs_and_residual_projections_by_depth():
    model = parts.new_model(part("gpt"), SIZES["gpt"], layers=8)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            expected = module.in_features**-0.5
            if name.endswith(("wo", "w2")):
                expected /= 4  # sixteen branches add up
            assert module.weight.std().item() == pytest.approx(expected, rel=0.05), name


def test_gpt_has_no_parameter_twice_when_tied():
    tied = parts.new_model(part("gpt"), SIZES["gpt"])
    untied = parts.new_model(part("gpt"), SIZES["gpt"], tied=False)
    assert len(tied.state_dict()) == len(list(tied.parameters())) == len(untied.state_dict()) - 1


def test_default_gpt_has_about_a_million_parameters():
    with torch.device("meta"):
        model = part("gpt").build(part("gpt").ModelConfig(), {"vocab_size": 257, "context": 128})
    assert 0.7e6 < sum(p.numel() for p in model.parameters()) < 1.3e6


def test_gpt_does_not_see_the_future_and_knows_the_order():
    model = parts.new_model(part("gpt"), SIZES["gpt"]).eval()
    for weight in model.parameters():
        weight.data *= 5 if weight.dim() == 2 else 1  # so that differences show
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
    changed = torch.tensor([[1, 2, 3, 4, 5, 9]])
    swapped = torch.tensor([[2, 1, 3, 4, 5, 6]])
    with torch.no_grad():
        a, b, c = model(tokens), model(changed), model(swapped)
    assert a.shape == (1, 6, 11)
    torch.testing.assert_close(a[:, :5], b[:, :5])
    assert (a[:, 5] - b[:, 5]).abs().max() > 1e-3
    assert (a[:, 5] - c[:, 5]).abs().max() > 1e-3


def test_rotary_positions_count_distance_only_also_in_bfloat16():
    rotate = part("gpt").rotate
    torch.manual_seed(0)
    q, k = torch.randn(8), torch.randn(8)
    turned_q, turned_k = (rotate(x.expand(1, 1, 2000, 8))[0, 0] for x in (q, k))
    near, far = turned_q[5] @ turned_k[2], turned_q[1905] @ turned_k[1902]
    torch.testing.assert_close(near, far, rtol=1e-3, atol=1e-3)
    low = rotate(q.expand(1, 1, 2000, 8).bfloat16())
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low[0, 0].float(), turned_q, rtol=0.05, atol=0.05)


def test_gpt_runs_with_a_part_of_the_heads():
    """As under tensor parallelism: the forward pass reads the number of heads off the projections."""
    model = parts.new_model(part("gpt"), SIZES["gpt"]).eval()
    x = torch.randn(2, 7, 128)
    attention = model.layers[0].attention
    whole = attention(x)
    halves = []
    for rows in (slice(0, 64), slice(64, 128)):
        half = parts.new_model(part("gpt"), SIZES["gpt"]).layers[0].attention
        for name in ("wq", "wk", "wv"):
            getattr(half, name).weight = nn.Parameter(getattr(attention, name).weight[rows])
        half.wo.weight = nn.Parameter(attention.wo.weight[:, rows])
        halves.append(half(x))
    torch.testing.assert_close(halves[0] + halves[1], whole)


@pytest.mark.parametrize(("model", "config"), VARIANTS)
def test_loss_and_score_are_float32_sums(model, config):
    code = part(model)
    net = parts.new_model(code, SIZES[model], **config).eval()
    inputs, targets = batch(model)
    if model == "gpt":
        targets[0, 5:] = -100
    total, count = code.loss(net, (inputs, targets))
    assert total.dim() == count.dim() == 0
    assert total.dtype == torch.float32
    assert int(count) == code.count((inputs, targets)) == int((targets != -100).sum())
    logits = net(inputs)
    assert logits.shape == (*targets.shape, logits.shape[-1])
    mean = nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
    torch.testing.assert_close(total / count, mean)
    score = code.score(net, (inputs, targets))
    torch.testing.assert_close(score["loss"], total)
    assert int(score["count"]) == int(count)
    if model == "gpt":
        assert score.keys() == {"loss", "count"}
    else:
        assert int(score["correct"]) == int((logits.argmax(-1) == targets).sum())
    with torch.autocast("cpu", torch.bfloat16):
        low, _ = code.loss(net, (inputs, targets))
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, total, rtol=0.05, atol=0.05)


def test_a_batch_without_real_tokens_costs_nothing():
    code = part("gpt")
    inputs, targets = batch("gpt")
    total, count = code.loss(
        parts.new_model(code, SIZES["gpt"]), (inputs, torch.full_like(targets, -100))
    )
    assert total.item() == count.item() == 0


def test_mlp_with_one_output_is_a_regression():
    code = part("mlp")
    net = parts.new_model(code, {"features": 6, "outputs": 1}).eval()
    features, targets = torch.randn(5, 6), torch.randn(5)
    total, count = code.loss(net, (features, targets))
    torch.testing.assert_close(total, ((net(features)[:, 0] - targets) ** 2).sum())
    assert int(count) == 5
    assert code.score(net, (features, targets)).keys() == {"loss", "count"}


@pytest.mark.parametrize("model", parts.MODELS)
def test_every_parameter_moves_in_the_first_step(model):
    code = part(model)
    net = parts.new_model(code, SIZES[model])
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0)
    for _ in range(2 if model == "resnet" else 1):  # residual branches open with the first step
        total, count = code.loss(net, batch(model))
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    still = [name for name, p in net.named_parameters() if torch.equal(p, before[name])]
    assert not still


@pytest.mark.parametrize(("model", "units"), [("mlp", 3), ("resnet", 8), ("vit", 4), ("gpt", 4)])
def test_blocks_are_disjoint_modules_under_their_names(model, units):
    code = part(model)
    net = parts.new_model(code, SIZES[model])
    blocks = code.blocks(net)
    assert len(blocks) == units
    for name, block in blocks:
        assert net.get_submodule(name) is block
    held = [id(p) for _, block in blocks for p in block.parameters()]
    assert len(set(held)) == len(held)


@pytest.mark.parametrize(("size", "shrinks"), [(16, False), (64, False), (96, True)])
def test_resnet_keeps_the_size_of_small_images(size, shrinks):
    sizes = {"channels": 1, "image_size": size, "classes": 2}
    model = parts.new_model(part("resnet"), sizes)
    x = torch.randn(2, 1, size, size)
    stem = model.maxpool(model.conv1(x))
    assert stem.shape[-1] == (size // 4 if shrinks else size)


@pytest.mark.parametrize(
    ("model", "config", "says"),
    [
        ("mlp", {"layers": 0}, "model.layers = 0"),
        ("mlp", {"dropout": 1.0}, "model.dropout = 1.0"),
        ("vit", {"patch_size": 5}, "5 does not divide the image size 16"),
        ("vit", {"heads": 3}, "model.heads = 3"),
        ("gpt", {"heads": 3}, "multiple of twice model.heads = 3"),
        ("gpt", {"dropout": -0.5}, "model.dropout = -0.5"),
    ],
)
def test_impossible_configs_are_refused_in_a_sentence(model, config, says):
    code = part(model)
    with pytest.raises(ValueError, match=says), torch.device("meta"):
        code.build(code.ModelConfig(**config), SIZES[model])


LEARNING = [
    # model, data config, steps, batch size, learning rate, the loss of a guess, and what must be reached
    ("mlp", {}, 40, 64, 3e-3, math.log(4), 0.4),
    ("resnet", {"image_size": 8, "noise": 0.2, "classes": 4}, 20, 16, 2e-3, math.log(4), 1.1),
    ("vit", {"classes": 4}, 25, 16, 1e-3, math.log(4), 0.7),
    ("gpt", {"context": 32, "strides": 2}, 50, 16, 2e-3, math.log(64), 2.0),
]


@pytest.mark.parametrize(("model", "config", "steps", "size", "lr", "guess", "reached"), LEARNING)
def test_the_loss_on_synthetic_data_visibly_falls(
    model, config, steps, size, lr, guess, reached, tmp_path
):
    code, data_code, _ = parts.load(model, f"synthetic_{SYNTHETIC[model]}")
    data = data_code.build(data_code.DataConfig(**config), tmp_path)
    net = parts.new_model(code, data.sizes)
    losses = parts.train(code, net, data.train, steps, size, lr)
    assert losses[0] == pytest.approx(guess, rel=0.35)
    assert sum(losses[-5:]) / 5 < reached, losses
    assert parts.evaluate(code, net, data.val, 128)["loss"] < reached + 0.2


def test_a_model_part_imports_nothing_of_the_package():
    for model in parts.MODELS:
        source = (parts.PARTS / "model" / f"{model}.py").read_text()
        assert "from ." not in source
