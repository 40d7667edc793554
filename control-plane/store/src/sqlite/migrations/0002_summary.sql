-- Summaries: every version is kept.
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

-- The version that was current when the turn was promoted: a repeat of a step composes the same context.
ALTER TABLE turn ADD COLUMN summary_version INTEGER;
