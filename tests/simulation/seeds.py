"""Seeds that once broke a rule, and the defect that each has found. They always run first."""

SEEDS: dict[int, str] = {
    1: "what was read of a step was not released where the step had moved to another process",
    318: "an instance that offered itself when it had just been taken back was counted for ever",
    329: "what was read was released at a successor before that had heard of its instances",
    370: "a worker that was still to offer itself never heard that a client had ended",
    1369: "a step was told by the scheduler that it had gone away from that nobody serves it",
    2266: "a client read what a worker had lent to an ensemble that had ended since",
    500103: "of two messages in one frame, the second came after the end of who had sent them",
    500473: "a process went on that had lent to it what an ensemble there had read",
    501088: "a step that streams waited for ever until it was read with what another had not made",
    501203: "an instance with the number of a dead process was taken to have its cached blocks",
    600508: "a scheduler that died while it was moved to was replaced twice",
    601310: "as 501088, where the other step had a condition",
    701974: "an instance that was announced where one was to retire was taken for that one",
    703270: "a version that was no longer served was published again, since its scheduler had died",
    707809: "a worker that changed over did not look for what its scheduler had sent before",
    711123: "a late request began, where a full queue had another one make room",
    711424: "of the instances of a successor, which come in one frame, some were not known yet",
    720367: "a worker that was told of its scheduler again forgot what that had sent",
    910612: "as 329, where the successor had heard of one instance and not of the other",
    31129050: "a move waited for an instance that loaded, when those with requests had exited",
}
