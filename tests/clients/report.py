"""Runs tests one after another and says how each went."""
import sys
import traceback


def run_all(tests):
    """Runs functions without arguments, and ends the program: with 1 when one has raised."""
    failed = 0
    for test in tests:
        try:
            test()
            print(f"ok      {test.__name__}", flush=True)
        except Exception:
            failed += 1
            print(f"FAILED  {test.__name__}\n{traceback.format_exc()}", flush=True)
    sys.exit(1 if failed else 0)
