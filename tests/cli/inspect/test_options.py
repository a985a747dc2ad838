"""`tgen inspect`: options that cannot be combined, and failed self-checks."""

import pytest

from support.models import make_model
from tgen.checkpoint import model_dir
from tgen.inspection.attention import AttentionRecorder
from tgen.tokenizer import train_char


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--layer", "9"], "--layer"),
        (["--head", "9"], "--head"),
        (["--query", "99"], "--query"),
        (["--keys", "99"], "--keys"),
        (["--view", "nothing"], "--view"),
        (["--view", "heads", "--svg", "x.svg"], "--svg"),
        (["--view", "model", "--csv", "x.csv"], "--csv"),
        (["--view", "heads", "--view", "tokens", "--csv", "x.csv"], "--csv"),
        (["--view", "heads", "--view", "heads"], "--view"),
        (["--layer", "all", "--head", "all", "--png", "x.png"], "--png"),
        (["--svg", "-", "--html", "-"], "stdout"),
        (["--svg", "x.svg", "--json"], "--json"),
        (["--view", "why", "--target", ""], "--target"),
        (["--query", "0:2", "--svg", "x.svg"], "--query"),
        (["--query", "0:2", "--csv", "x.csv"], "--query"),
        (["--keys", "0:2", "--json"], "--keys"),
        (["--view", "heads", "--html", "x.html"], "--view: no effect on --html"),
        (["--view", "training", "--model", "x"], "`tgen compare` draws the curves"),
        (["--target", "x"], "--target"),
        (["--ablate", "zero"], "--ablate"),
        (["--view", "tokens", "--measure", "value"], "--measure"),
        (["--view", "heads", "--head", "mean"], "--head"),
        (["--view", "predict", "--query", "0:2"], "--query"),
        (["--view", "why", "--target", "What is the king" * 50], "--target"),
        (["--view", "why", "--keys", "99"], "--keys"),
        (["--svg", "x.svg", "--csv", "./x.svg"], "--csv"),
        (["--html", "x.html", "--top", "3"], "--top"),
        (["--html", "x.html", "--typical-p", "0.5"], "--typical-p"),
        (["--view", "tokens", "--cells", "num"], "--cells"),
        (["--view", "predict", "--layer", "1"], "--layer"),
        (["--hide-first", "--keys", "0:2"], "--hide-first"),
        (["--view", "tokens", "--repetition-penalty", "2"], "--repetition-penalty"),
        (["--view", "predict", "--samplers", "nothing"], "--samplers"),
        (["--view", "predict", "--top-p", "2"], "--top-p"),
        (["--view", "patch"], "--patch"),
        (["--patch", "What"], "--patch has 1 token,"),
        (["--patch", ""], "--patch is empty"),
        (["--view", "tokens", "--patch", "x"], "--patch"),
        (["--group", "0.9"], "--group"),
        (["--activations", "x", "--view", "heads"], "--view"),
        (["--activations", "x", "--head", "1"], "--head"),
        (["--activations", "x", "--parts", "z"], "--parts"),
        (["--parts", "heads"], "--parts"),
        (["--patch", "What is the king!", "--parts", "all", "--svg", "x.svg"], "--svg"),
    ],
)
def test_conflicting_options_are_usage_errors(inspect, arguments, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = inspect(*arguments)
    message = done.stderr.decode()
    assert done.returncode == 2, message
    assert named in message
    assert len(message.splitlines()) <= 3
    assert not list(tmp_path.iterdir())


def test_failed_check_is_an_error(inspect, monkeypatch):
    original = AttentionRecorder.attention
    monkeypatch.setattr(
        AttentionRecorder,
        "attention",
        lambda self, layer, q, *rest: original(self, layer, q * 2, *rest),
    )
    for view in ("attention", "verify", "heads"):
        done = inspect("--view", view)
        assert (done.returncode, b"self-checks failed" in done.stderr) == (1, True)


def test_failed_check_stays_failed_after_later_views(inspect, monkeypatch):
    original = AttentionRecorder.attention

    def wrong_in_layer_1(self, layer, q, *rest):
        original(self, layer, q * (2 if layer == 1 else 1), *rest)

    monkeypatch.setattr(AttentionRecorder, "attention", wrong_in_layer_1)
    views = ["--view", "heads", "--view", "attention", "--layer", "0", "--head", "0"]
    for more in ([], ["--json"]):
        assert inspect(*views, *more).returncode == 1
    views[1] = "verify"
    assert inspect(*views).returncode == 1


def test_nan_is_a_failed_check(inspect, trained, tmp_path):
    bundle = model_dir.load(trained)
    bundle.arrays["blocks.1.attention.qkv_proj.weight"][:] = 3e38  # twice it overflows
    model_dir.save(tmp_path / "huge", bundle.config, bundle.tokenizer, bundle.arrays)
    done = inspect("--layer", "1", model=tmp_path / "huge")
    assert (done.returncode, b"self-checks failed" in done.stderr) == (1, True)


def test_comparison_needs_equal_tokens(inspect, trained, tmp_path):
    other = train_char([b"What is the king?"])
    model = make_model("qwen3", vocab_size=300)
    model_dir.save(tmp_path / "other", model.config, other, model.to_arrays())
    two = ["-m", trained, "-m", tmp_path / "other", "--view", "heads"]
    done = inspect(*two, model=None)
    assert (done.returncode, b"tokenize this text differently" in done.stderr) == (2, True)


def test_post_norm_model_has_no_lens_and_its_attribution_leaves_out_tokens_alone(
    inspect, tmp_path, tokenizer
):
    path = tmp_path / "classic"
    config = make_model("classic", vocab_size=tokenizer.vocab_size)
    model_dir.save(path, config.config, tokenizer, config.to_arrays())
    done = inspect("--view", "lens", model=path)
    assert (done.returncode, b"classic" in done.stderr) == (2, True)
    done = inspect("--view", "why", model=path)
    assert done.returncode == 0, done.stderr
    assert b"a post-norm model has no residual stream" in done.stdout
    assert inspect("--html", tmp_path / "x", model=path).returncode == 0
