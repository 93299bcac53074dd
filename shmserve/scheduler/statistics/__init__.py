"""A model version's statistics, updated with a few additions a request (pure).

table.py            a flat table of counters: snapshot and restore
counters.py         requests, and the report of everything
generation_stats.py tokens, steps and blocks of a model that generates text
timing.py           the phases of an execution, from what a worker says of it; reported times

`Statistics.report` gives the entry of GET /v2/models/NAME/stats, field by field as Triton shows it:

    name, version, last_inference, inference_count, execution_count, inference_stats,
    response_stats, batch_stats, memory_usage

and one key more, `shmserve`, for metrics: the flat table with what the versions that this one
replaces had counted (its base), and what is so now:

    inference_count, execution_count, success, fail, cache_hit, cache_miss, and times:
        success_ns, fail_ns, queue_ns, compute_input_ns, compute_infer_ns, compute_output_ns,
        cache_hit_ns, cache_miss_ns
    failures        {"REJECTED" | "CANCELED" | "BACKEND" | "OTHER": requests}
    batches_closed  {reason of batchers.base.Closed: executions}
    request_seconds, queue_seconds (one observation a success), compute_seconds, batch_size (one an
        execution), first_response_ms (one a request; decoupled models only)
                    {"buckets": upper bounds, "counts": observations per bucket, not cumulative,
                    one more than bounds (+Inf), "sum", "count"}
    instance_changes {"more" | "fewer": how often there was an instance more, or one less, between
                    the bounds of their number}
    workers_lost    instances that died or were killed while they were in use
    retried         requests that ran again, alone, after that
    overruns        executions that passed the limit
    malformed       frames and messages that were dropped
    copied_bytes    {"in" | "out": bytes of tensors that workers copied for the model, or from it;
                    none for what is used where it lies}
    padding         {padded input: [elements, of these padding]}

    pending         requests in the queue now
    executing       requests at workers now
    live            requests that have not ended
    open_sequences  sequences that have begun and not ended
    quantiles       {"request" | "queue" | "compute_input" | "compute_infer" | "compute_output":
                    [[quantile, µs or None], ...]} of the last minute, one observation a success;
                    empty unless they are asked for
    instances       {"gone" | "expected" | "idle" | "busy" | "doomed": instances}
    cache           {"bytes", "entries", "evicted", "lent_bytes"} of the response cache; empty: it
                    has none
    families        the model's own metrics, as model_metrics.plain has them

`Statistics.snapshot` gives the table itself, without base, with "base" beside it, and rows that are
this version's alone: batch_sizes, responses, last_ns (of the last execution, monotonic).

A request counts when its last response is known, before that is sent: who asks after its own sees
itself. A decoupled model's request has failed if its model raised, or nothing was there to take its
responses; an error that the model sends, the last one too, is a response, counted in
`response_stats` alone.
"""
