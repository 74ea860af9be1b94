-- The journal as its first version made it.
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE jobs (
    key TEXT PRIMARY KEY,
    idx INTEGER NOT NULL, k INTEGER NOT NULL, line INTEGER NOT NULL, id TEXT NOT NULL,
    state TEXT NOT NULL,                -- pending, running, done, failed, filtered
    gone INTEGER NOT NULL DEFAULT 0,    -- 0 in the manifest, 1 vanished from it, 2 left out by a limit
    attempts INTEGER NOT NULL DEFAULT 0,
    seed TEXT NOT NULL,                 -- decimal: 2^64-1 fits no SQLite integer
    output TEXT NOT NULL, name_key TEXT NOT NULL,
    job TEXT NOT NULL,                  -- the whole job as JSON
    size_bytes INTEGER, sha256 TEXT, batch INTEGER, seconds REAL, flags TEXT, written_at REAL,
    settings TEXT,                      -- what the file's metadata says beyond the job, as JSON
    kind TEXT, stage TEXT, reason TEXT, -- of the last failure
    spool TEXT,                         -- denoised latents below the run folder
    worker INTEGER
);
CREATE UNIQUE INDEX jobs_name ON jobs (name_key);
CREATE INDEX jobs_pending ON jobs (attempts, spool IS NULL, idx, k) WHERE state = 'pending' AND gone = 0;
CREATE INDEX jobs_order ON jobs (gone, idx, k, key);
CREATE INDEX jobs_state ON jobs (gone, state);
CREATE INDEX jobs_written ON jobs (written_at) WHERE state = 'done';
CREATE INDEX jobs_spool ON jobs (spool) WHERE spool IS NOT NULL;
CREATE TABLE skipped (line INTEGER NOT NULL, id TEXT, reason TEXT NOT NULL);
CREATE TABLE found (key TEXT PRIMARY KEY, output TEXT NOT NULL, name_key TEXT NOT NULL, seed TEXT) WITHOUT ROWID;
CREATE INDEX found_name ON found (name_key);
CREATE TABLE workers (
    worker INTEGER PRIMARY KEY, pid INTEGER, device TEXT, state TEXT NOT NULL, since REAL NOT NULL, window INTEGER, stage TEXT,
    jobs INTEGER NOT NULL DEFAULT 0, rss_bytes INTEGER, device_bytes INTEGER, device_peak_bytes INTEGER,
    slope_bytes_per_hour REAL, deaths INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE runs (
    id INTEGER PRIMARY KEY, started REAL NOT NULL, ended REAL, stopped_by TEXT, host TEXT, pid INTEGER, done_before INTEGER NOT NULL
);
CREATE TABLE memory (
    run INTEGER NOT NULL, at REAL NOT NULL, worker INTEGER NOT NULL, pid INTEGER, stage TEXT NOT NULL,
    rss_bytes INTEGER NOT NULL, device_bytes INTEGER NOT NULL, device_peak_bytes INTEGER NOT NULL
);
PRAGMA application_id = 1650944561;
PRAGMA user_version = 1;
