CREATE TABLE change (
    key INTEGER PRIMARY KEY,
    conversation_key INTEGER NOT NULL REFERENCES conversation (key),
    cursor INTEGER NOT NULL,
    time INTEGER NOT NULL,
    kind TEXT NOT NULL,
    turn_key INTEGER REFERENCES turn (key),
    seq INTEGER,
    number INTEGER,
    own_key TEXT,
    event_time INTEGER,
    payload BLOB NOT NULL,
    UNIQUE (conversation_key, cursor),
    CHECK ((turn_key IS NULL) = (kind = 'FACT') AND (turn_key IS NULL) = (seq IS NULL))
) STRICT;

CREATE UNIQUE INDEX change_number ON change (turn_key, number) WHERE number IS NOT NULL;

CREATE UNIQUE INDEX change_own ON change (turn_key, own_key) WHERE own_key IS NOT NULL;

CREATE UNIQUE INDEX change_seq ON change (turn_key, seq) WHERE turn_key IS NOT NULL;

CREATE TABLE conversation (
    key INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    project TEXT,
    provider TEXT,
    external_id TEXT,
    title TEXT NOT NULL,
    archived INTEGER NOT NULL DEFAULT 0 CHECK (archived IN (0, 1)),
    last_seq INTEGER NOT NULL DEFAULT 0,
    last_position INTEGER NOT NULL DEFAULT 0,
    last_cursor INTEGER NOT NULL DEFAULT 0,
    pruned_through INTEGER NOT NULL DEFAULT 0,
    epoch INTEGER NOT NULL DEFAULT 0,
    last_agent TEXT,
    last_workspace_id TEXT REFERENCES workspace (id),
    create_time INTEGER NOT NULL,
    update_time INTEGER NOT NULL,
    UNIQUE (project, provider, external_id),
    CHECK ((project IS NULL) = (provider IS NULL) AND (project IS NULL) = (external_id IS NULL))
) STRICT;

CREATE TABLE diagnosis (
    key INTEGER PRIMARY KEY,
    turn_key INTEGER NOT NULL REFERENCES turn (key),
    epoch INTEGER NOT NULL,
    runner_id TEXT,
    payload BLOB NOT NULL,
    time INTEGER NOT NULL
) STRICT;

CREATE INDEX diagnosis_turn ON diagnosis (turn_key);

CREATE TABLE message (
    key INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    conversation_key INTEGER NOT NULL REFERENCES conversation (key),
    seq INTEGER NOT NULL,
    position INTEGER,
    role TEXT NOT NULL CHECK (role IN ('USER', 'AGENT', 'SYSTEM')),
    actor TEXT NOT NULL,
    body TEXT NOT NULL,
    turn_id TEXT,
    incomplete INTEGER NOT NULL DEFAULT 0 CHECK (incomplete IN (0, 1)),
    truncated INTEGER NOT NULL DEFAULT 0 CHECK (truncated IN (0, 1)),
    create_time INTEGER NOT NULL,
    UNIQUE (conversation_key, seq)
) STRICT;

CREATE UNIQUE INDEX message_position ON message (conversation_key, position) WHERE position IS NOT NULL;

CREATE TABLE meta (
    name TEXT NOT NULL PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE permission (
    key INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    turn_key INTEGER NOT NULL REFERENCES turn (key),
    tool TEXT NOT NULL,
    title TEXT NOT NULL,
    deadline INTEGER,
    body BLOB NOT NULL,
    create_time INTEGER NOT NULL,
    intent TEXT,
    result TEXT,
    settle_time INTEGER,
    CHECK ((result IS NULL) = (settle_time IS NULL))
) STRICT;

CREATE INDEX permission_open ON permission (turn_key) WHERE settle_time IS NULL;

CREATE INDEX permission_turn ON permission (turn_key, key);

CREATE TABLE request (
    id TEXT NOT NULL PRIMARY KEY,
    rpc TEXT NOT NULL,
    body_hash BLOB NOT NULL CHECK (length(body_hash) = 32),
    answer TEXT NOT NULL,
    time INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE runner (
    id TEXT NOT NULL PRIMARY KEY,
    name TEXT NOT NULL,
    address TEXT NOT NULL,
    version TEXT NOT NULL,
    protocol_version INTEGER NOT NULL,
    roots TEXT NOT NULL,
    boot_id TEXT NOT NULL,
    description BLOB NOT NULL,
    draining INTEGER NOT NULL DEFAULT 0 CHECK (draining IN (0, 1)),
    create_time INTEGER NOT NULL,
    register_time INTEGER NOT NULL,
    heartbeat_time INTEGER NOT NULL
) STRICT;

CREATE TABLE session (
    key INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    conversation_key INTEGER NOT NULL REFERENCES conversation (key),
    workspace_id TEXT NOT NULL REFERENCES workspace (id),
    agent_name TEXT NOT NULL,
    engine TEXT NOT NULL,
    model TEXT NOT NULL,
    prompt_sha256 TEXT NOT NULL,
    unusable_reason TEXT,
    native_ref BLOB,
    watermark INTEGER NOT NULL DEFAULT 0,
    replaces TEXT REFERENCES session (id),
    created_by TEXT NOT NULL,
    create_time INTEGER NOT NULL,
    use_time INTEGER NOT NULL
) STRICT;

CREATE INDEX session_conversation ON session (conversation_key, key);

CREATE INDEX session_workspace ON session (workspace_id, key);

CREATE TABLE slot (
    workspace_id TEXT NOT NULL PRIMARY KEY REFERENCES workspace (id),
    turn_key INTEGER NOT NULL UNIQUE REFERENCES turn (key),
    time INTEGER NOT NULL
) STRICT;

CREATE TABLE summary (
    key INTEGER PRIMARY KEY,
    conversation_key INTEGER NOT NULL REFERENCES conversation (key),
    version INTEGER NOT NULL CHECK (version > 0),
    through INTEGER NOT NULL CHECK (through > 0),
    text TEXT NOT NULL,
    author TEXT NOT NULL,
    create_time INTEGER NOT NULL,
    UNIQUE (conversation_key, version)
) STRICT;

CREATE TABLE turn (
    key INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    conversation_key INTEGER NOT NULL REFERENCES conversation (key),
    message_key INTEGER NOT NULL REFERENCES message (key),
    state TEXT NOT NULL CHECK (state IN ('QUEUED', 'DISPATCHING', 'RUNNING', 'WAITING_FOR_PERMISSION',
        'CANCELLING', 'COMPLETED', 'FAILED', 'CANCELLED', 'LOST')),
    epoch INTEGER NOT NULL DEFAULT 0,
    promotion INTEGER UNIQUE,
    agent_name TEXT,
    agent TEXT,
    workspace_id TEXT REFERENCES workspace (id),
    session_id TEXT REFERENCES session (id),
    opening TEXT,
    accepted INTEGER NOT NULL DEFAULT 0 CHECK (accepted IN (0, 1)),
    retry_of TEXT,
    error TEXT,
    agent_message_id TEXT REFERENCES message (id),
    usage TEXT NOT NULL,
    last_seq INTEGER NOT NULL DEFAULT 0,
    last_number INTEGER NOT NULL DEFAULT 0,
    surface TEXT NOT NULL CHECK (surface IN ('manual', 'mcp', 'ui')),
    create_time INTEGER NOT NULL,
    start_time INTEGER,
    cancel_time INTEGER,
    end_time INTEGER,
    acknowledge_time INTEGER, summary_version INTEGER,
    CHECK ((end_time IS NOT NULL) = (state IN ('COMPLETED', 'FAILED', 'CANCELLED', 'LOST')))
) STRICT;

CREATE INDEX turn_conversation ON turn (conversation_key, key);

CREATE INDEX turn_dispatching ON turn (workspace_id) WHERE state = 'DISPATCHING';

CREATE UNIQUE INDEX turn_lock ON turn (conversation_key)
    WHERE state IN ('DISPATCHING', 'RUNNING', 'WAITING_FOR_PERMISSION', 'CANCELLING');

CREATE INDEX turn_queue ON turn (conversation_key, key) WHERE state = 'QUEUED';

CREATE INDEX turn_unacknowledged ON turn (workspace_id) WHERE end_time IS NOT NULL AND acknowledge_time IS NULL;

CREATE TABLE workspace (
    id TEXT NOT NULL PRIMARY KEY,
    runner_id TEXT NOT NULL,
    path TEXT NOT NULL,
    create_time INTEGER NOT NULL,
    UNIQUE (runner_id, path)
) STRICT;
