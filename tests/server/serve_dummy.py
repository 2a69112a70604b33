"""`python serve_dummy.py [step_time_s] [noria's arguments]`: the real command over the dummy runner, for tests of the
process itself. Everything but the model is what `noria` runs."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from conftest import MODEL_NAME, make_loader

from core.dummy_runner import ByteTokenizer, make_dummy_runner
from core.errors import ConfigError, ModelRefused
from server.__main__ import leave, make_parser, run_backend
from server.backends.native import NativeBackend
from server.config import Override, load_config
from server.logs import configure_logging
from server.metrics import Metrics


def main() -> None:
    step_time_s = float(sys.argv[1])
    options = make_parser().parse_args(sys.argv[2:])
    flags = [Override("--port", "server.port", options.port or 0)]
    try:
        config, _ = load_config(None, {}, [*options.set, *flags], default_path="")
        configure_logging(config.log)
        runner = make_dummy_runner(step_time_s=step_time_s)
        load = make_loader(config, runner, ByteTokenizer())
        if options.model == "refused":

            def load(report):
                raise ModelRefused("This model is refused, and this is why.")

        if options.model == "slow":

            def load(report):
                time.sleep(60)

        metrics = Metrics(MODEL_NAME)
        backend = NativeBackend(config.engine, load, metrics, config.log.stats_interval_s)
        code = run_backend(config, backend, metrics, time.monotonic())
    except ConfigError as error:
        print(f"noria: {error.message}", file=sys.stderr)
        code = 2
    leave(code)


main()
