"""`tgen inspect`: show a model's attention, predictions, parameters and training history."""

from tgen.cli import console
from tgen.cli.inspect.options import InspectOptions
from tgen.cli.options import make_command, read_prompt


def inspect(options: InspectOptions) -> None:
    """Show a model's attention, predictions and training history.

    Views: attention (attention weights of a head), heads (role and metrics of every head), tokens
    (surprisal of each token), predict (next-token probabilities; with sampling options, after each
    sampler), lens (logit lens: predictions after each layer), why (earlier tokens and components
    that make up a logit), ablation (loss and next token without groups of heads and layers), patch
    (activations that restore the answer in another prompt), rollout (attention rollout), sources
    (passages of the text that also occur in the training text), positions (position encoding),
    model (parameters and shape), training (loss curves), verify (checks against the fused attention
    kernel).

    --view heads with two --model options compares the heads of two models.
    """
    from tgen.checkpoint.model_lookup import find_model
    from tgen.lora.adapter import find_adapter

    names: list[str | None] = [*options.model] or [options.adapter]
    adapter = find_adapter(options.adapter) if options.adapter else None
    locations = [find_model(name) for name in names]
    if options.only_training:
        from tgen.cli.inspect.training_curves import print_training_log

        print_training_log(locations[0].path, options)
        return
    if options.live:
        _show_live(options)
        return
    text = None
    if options.needs_text:
        text = read_prompt(options.prompt, options.prompt_file)
    if text is not None and options.only_sources:
        from tgen.cli.inspect.sources import print_sources

        print_sources(adapter or locations[0].path, text, options)
        return

    from tgen.cli.inspect import output
    from tgen.inspection.inspector import Inspector
    from tgen.lora.model_with_adapter import load

    inspectors = [
        Inspector(
            load(path, adapter=adapter if options.model else None),
            text,
            device=options.device,
            tail=options.tail,
            found_by=rule,
        )
        for path, rule in locations
    ]
    for path, _ in locations:
        console.print_status(f"{path}")
    for warning in (w for inspector in inspectors for w in inspector.bundle.warnings):
        console.print_status(f"warning: {warning}")
    if (flag := options.prompt_flag) and not options.shows_text:
        views = ", ".join(options.views)
        console.print_status(f"note: {flag} has no effect on --view {views}")
    if options.width:
        from tgen.cli.rich_console import out

        out.width = options.width
    if len(inspectors) == 2:
        output.print_comparison(inspectors, options)
    elif options.files:
        output.write_files(inspectors[0], options)
    elif options.json:
        output.print_json(inspectors[0], options)
    else:
        output.print_tables(inspectors[0], options)


def _show_live(options: InspectOptions) -> None:
    """Serve the model on a free port, and open its page."""
    from tgen.cli.serve import ServeOptions, run_server
    from tgen.config import EngineOptions

    text = b""
    if options.prompt_flag:
        text = read_prompt(options.prompt, options.prompt_file)
    served = ServeOptions(
        model=options.model,
        adapter=[options.adapter] if options.adapter else [],
        port=0,
        open_page=True,
        log="off",
        engine=EngineOptions(device=options.device),
    )
    run_server(served, text=text)


command = make_command(inspect, InspectOptions)
