"""`python -m tests.vllm.plain FLAGS`: vLLM's own API server, started with a quarter less CPU time,
because garbage collection pauses while it and its engine process import their modules."""

from dynamo_lite.runtime.process.imports import import_large

if __name__ == "__main__":
    import_large("vllm.entrypoints.launchers.api_server.entry")

    from vllm.entrypoints.launchers.api_server.entry import main

    main()
elif __name__ == "__mp_main__":
    # The engine process: multiprocessing imports its parent's main module first.
    import_large("vllm.v1.engine.core")
