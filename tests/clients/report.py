"""Runs tests one after another and says how each went."""
import sys
import traceback


def run_all(tests):
    """Runs functions without arguments, those that the command line names after an address, or all. Ends the program:
    with 1 when one has raised."""
    wanted = set(sys.argv[2:])
    if unknown := wanted - {test.__name__ for test in tests}:
        sys.exit(f"no such tests: {', '.join(sorted(unknown))}")
    tests = [test for test in tests if test.__name__ in (wanted or {test.__name__})]
    failed = 0
    for test in tests:
        try:
            test()
            print(f"ok      {test.__name__}", flush=True)
        except Exception:
            failed += 1
            print(f"FAILED  {test.__name__}\n{traceback.format_exc()}", flush=True)
    sys.exit(1 if failed else 0)
