"""`tgen bench`: measure the model's speed on this machine, and the effect of a change."""

from dataclasses import replace

from tgen.cli import console
from tgen.cli.bench.options import BenchOptions
from tgen.cli.model_loading import announce_compiling
from tgen.cli.options import check_output_file, make_command


def bench(options: BenchOptions) -> None:
    """Measure the model's speed on this machine, in llama-bench's terms.

    Names of tests: pp512 prefills a prompt of 512 tokens; tg128 decodes 128 tokens one by one; with
    @ d4096, the KV cache starts with 4096 tokens. N,... is a list (128,256) or a range (64-256+64,
    64-512*2); all combinations are measured, interleaved. Only forward passes are
    timed, except with --train and --end-to-end.
    """
    from tgen.cli.bench.whole_process import run_end_to_end, run_train

    console.require_stdout()  # before minutes of measurements
    if options.save:
        check_output_file("--save", options.save)
    if options.json_output:
        options = replace(options, output="json")
    if options.baseline and options.model is None:
        from tgen.cli.bench.throughput import saved_model

        options = replace(options, model=saved_model(options.baseline))
    path = options.path
    announce_compiling()
    console.print_status(f"{path}")
    if options.kv_cache:
        from tgen.cli.bench.kv_cache import run_kv_cache

        run_kv_cache(options)
    elif options.train:
        run_train(options)
    elif options.end_to_end:
        run_end_to_end(options)
    else:
        from tgen.cli.bench import throughput

        if options.against:
            throughput.run_against(options, options.against)
        elif options.baseline:
            throughput.run_compare(options, options.baseline, options.fail_if_slower)
        else:
            throughput.run_throughput(options)


command = make_command(bench, BenchOptions)
