"""The JSON of the page, for the page itself and for scripts. Every answer is made from files.

A run is named by its path below the folder of runs, with `/` between the parts: `sweeps/a3`. In a
query it is one value (`run=sweeps/a3`, percent-encoded); in a path its parts are encoded one by one
and joined by `/`. Unknown runs are 404, bad values 400, a missing or wrong token 401, control that
is off 403; each is `{"error": {"message": str}}`. Times are seconds since 1970, sizes bytes. What a
run has no file for is `null` or empty, never an error. NaN and infinities are `null`.

Where the server has a token, all below `/api`, `/export` and `/files` asks for it, as
`Authorization: Bearer TOKEN` or, where a browser cannot set a header (EventSource, links, images),
as the query's `token`. The shell and `/static` hold no data and need none: they take the token from
the address' fragment, `/#token=...`.

GET /api/about
    {"version", "folder": its name, "control": bool, "token": whether one is needed}

GET /api/runs        ETag; 304 with If-None-Match; `truncated`: more runs than are listed
    {"runs": [RUN...], "truncated": bool, "disk": {"free", "total"}}
    RUN = {"id", "name": its last part, "group": the parts before,
      "kind": "train" | "tune" | "serve" | "host" | "quantize" | "cluster" | "unknown",
      "method": "pretrain", "grpo"... | null,
      "status": "running" | "finished" | "stopped" | "failed" | "unknown",
      "step": int | null, "steps": int | null, "started", "updated": float | null,
      "hosts": int, "metrics": {name: last value | null}, "config": {"optim.learning_rate": 3e-4},
      "alerts": [ALERT...]}
    ALERT = {"kind": "nan" | "spike" | "stall" | "reward" | "disk" | "fault", "level": "warning" |
      "error", "step": int | null, "time": float | null, "metric": str | null, "message": what,
      "fix": what to do}. In the list they are of the last 32 kB of metrics, of a run that was read
      whole (once a series of it was asked for) of all.

GET /api/runs/ID
    RUN and {"config_text": str, "files": [{"name", "bytes", "modified"}], "folders": [name],
      "checkpoints": [{"step", "bytes", "modified"}], "profiles": [{"name": of a capture, its
      path below profile/, "bytes", "modified", "ranks"}], "requests": [{"name", "kind", "done":
      bool, "result"}], "pages": [name of an HTML page in the run for /files], "plan": PLAN | null,
      "measured": {"step_seconds", "tokens_per_second", "mfu"; each | null}, "skipped":
      {"junk": lines of metrics that are not JSON objects, "huge": lines over 4 MB} | null before
      it was read whole}

GET /api/runs/ID/names     {"names": [{"name", "count", "first_step", "last_step", "last"}], "x":
      axes that it has, of "step", "tokens", "time", "axes": {"tokens": name of its counter}}
      Waits until the file was read whole.

GET /api/series?run=ID&run=...&name=loss&name=...&x=step|tokens|time&points=1000&from=&to=
    {"series": [{"run", "name", "x": [], "y": [], "min": [], "max": [], "nan": places on the
      x axis where values were not finite, the first 100, "n": points there are in the range,
      "raw": whether each is there by itself, "complete": bool, "offset": byte from which
      `/api/live` continues}]}, a run and name each, in the order asked for.
    `x=time` is seconds since the run's first record. Of more points than `points` (10 to 20000)
    each bucket of equal numbers of points gives its mean (`y`) at its mean x, its least and its
    greatest value: a spike of one step is always in `min` or `max`. A value that was not finite is
    null in all three.
    `complete` false: the file is still being read, and these are samples spread over it, so that
    300 runs draw at once; ask again, or wait for the event `complete`.

GET /api/runs/ID/samples?step=&search=&order=drawn|reward|-reward|advantage|-advantage|-tokens
                        &offset=0&limit=50
    {"steps": [int...], "step": int | null (the newest if none was asked for), "total",
     "samples": [as in samples.jsonl: step, round, group, where, prompt, completion, reward,
     rewards: {part: value}, advantage, tokens, finish_reason, versions, status, and, where the run
     keeps them, "pieces": [text], "logprobs": [...], "advantages": [...] a token; texts are cut at
     20000 characters, then "cut": true]}
    `prompt=TEXT` instead of `step` gives the completions of one prompt over all steps.

GET /api/runs/ID/goodput   {"spans": [{"begin", "end", "cause", "waited"}], "ranks": {"1": [spans]},
      "seconds": {cause: s}, "goodput": share, "wall_seconds", "down_seconds", "attempts", "steps",
      "faults": [{"kind", "rank", "epoch", "drill", "began", "named", "formed"}],
      "spikes": [rewinds]}
      Neighbouring spans of one cause are one; beyond 2000 the shortest join their neighbours.
GET /api/runs/ID/events?limit=500   {"events": [newest last], "total"}
GET /api/runs/ID/server    {"kind", "model", "names": [...], "time": [...], "columns": {name:
      [...]}, "last": {...}, "models": {...}}: requests, tokens, cache, batch fill over time, as
      `fornax serve` and `fornax host` write them to `server.jsonl`; at most 1000 rows.
GET /api/runs/ID/data      {"config": its data section | null, "dataset": what the run found, from
      `data.json`: {"documents", "tokens" | null, "parts": [{"name", "documents", "tokens",
      "share"}], "packing", "seq_len", "batch_size", "virtual_shards", "rows" of a pass | null,
      "steps_per_epoch" | null} | null, "packing": str | null, "seq_len", "batch_size", "rows": rows
      seen | null, "epoch": passes over the data | null, "positions": [{"shard", "position"}] of the
      newest checkpoint, "step": of it, "names": metrics of the data}
GET /api/runs/ID/memory    what the trainer wrote to `program.json`, of one device: {"device",
      "devices", "peak_flops" | null, "bandwidth" | null, "programs": [{"name", "flops", "bytes",
      "peak_bytes", "usable_bytes" | null, "owners": {owner: bytes}, "buffers": [{"name", "kind",
      "shape", "bytes", "source"}], "roofline": {"classes": [{"name", "flops", "bytes",
      "seconds", "bound"}], "seconds", "bound"} | null where no table knows the device, "notes":
      []}], "plan": PLAN | null, "measured": as above}
      PLAN = what `fornax plan --json` wrote to `plan.json` in the run directory.
GET /api/runs/ID/images?offset=0&limit=100   {"total", "images": [{"path": for /files, "step" |
      null, "bytes", "modified"}]}
GET /api/runs/ID/quantization   what `fornax quantize` wrote, without its long tables:
      {"report": {...}, "tensors": [{"name", "scheme", "error"}], "kept": [{"name", "why"}]} | null

GET /api/profile?run=ID&capture=NAME&before=NAME&before_run=ID
    {"page": address of the capture's page, for this start of the server}: what `fornax profile show
      --html` writes, in a sandbox; with `before` (of `run`, or of `before_run`) what `fornax
      profile compare --html` writes. It answers when the page was made, after seconds, by a process
      that may take 5 minutes and 4 GiB; 400 with the reason where it cannot be made.

GET /api/diff?run=A&run=B&run=...
    {"runs": [...], "keys": [{"key", "values": [one a run, null where it has no such key], "same":
      bool}]}; the different ones first.

GET /api/live?run=ID&run=...&after=OFFSET,...       text/event-stream
    Of each run the lines of metrics after its byte offset, one for each `run` in that order;
    without `after` from the end. The id of an event is the offsets after it, so that a browser that
    connects again resumes where it was (Last-Event-ID). Without `run` only the last two of these:
      lines     {"run", "records": [objects], "offset"}   at most 1000 records each
      reset     {"run", "why": "rewritten" | "gone"}   forget its points, ask for the series again
      complete  {"run"}   it was read whole: its series is exact now (told at the beginning too)
      changed   {"run", "files": ["samples.jsonl"...]}   another file of it grew
      run       {"run": RUN without its config}   its line in the list is another
      runs      {}   a run came or went: ask for the list again

POST /api/runs/ID/requests   {"kind": "profile", "steps": 5} | {"kind": "checkpoint"} | {"kind":
      "stop"}; content-type application/json; 202 {"request": name}. Only with --control.

GET /files?run=ID&path=profile/x.html    an HTML page, in a sandbox, or a picture of a run. Of a
      page that was asked for with `token` the browser is sent on to an address of that file alone.
GET /export?run=ID&run=...               one HTML file: the page with the runs' answers inside, as
      data {"exported": time, "answers": {path with query: answer}}: the page looks there instead of
      asking. Series are there as `/api/series?run=ID&name=NAME&x=X`, one each.
"""
