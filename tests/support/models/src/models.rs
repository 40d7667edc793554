//! The handle on a scripted model: rules in, log out.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::sync::watch;

use crate::{
    Conversation, Ending, Error, GateState, Record, Reply, RequestKind, Script,
    gates::Gates,
    grammar,
    log::{EndMark, Log},
    script::FaultRule,
};

/// Counters kept at once for "so many times, then ok"; the oldest is forgotten beyond that.
const MAX_COUNTERS: usize = 4096;

/// How a scripted model behaves where no rule and no marker says anything.
#[derive(Debug, Clone)]
pub struct Options {
    /// The port on 127.0.0.1; 0 lets the system choose.
    pub port: u16,
    /// The reply without rule and marker.
    pub default_reply: Script,
    /// Records kept.
    pub max_records: usize,
    /// Bytes of bodies kept over all records; the newest body is kept in any case.
    pub max_body_bytes: usize,
}

impl Default for Options {
    /// Any port, the text `ok`, 5,000 records, 64 MiB of bodies.
    fn default() -> Self {
        Self { port: 0, default_reply: Script::text("ok"), max_records: 5000, max_body_bytes: 64 << 20 }
    }
}

type Test = dyn Fn(&Conversation) -> bool + Send + Sync;

/// Which requests a rule is for.
#[derive(Clone)]
pub enum Matcher {
    /// Every main request.
    Any,
    /// Those whose turn text contains this.
    Contains(String),
    /// Those whose turn text is exactly this.
    Is(String),
    /// Those for which this is true.
    When(Arc<Test>),
}

impl Matcher {
    /// A matcher by function.
    #[must_use]
    pub fn when(test: impl Fn(&Conversation) -> bool + Send + Sync + 'static) -> Self {
        Self::When(Arc::new(test))
    }

    fn matches(&self, conversation: &Conversation) -> bool {
        match self {
            Self::Any => true,
            Self::Contains(part) => conversation.turn_text().contains(part),
            Self::Is(text) => conversation.turn_text() == text,
            Self::When(test) => test(conversation),
        }
    }
}

impl std::fmt::Debug for Matcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Any => f.write_str("Any"),
            Self::Contains(part) => f.debug_tuple("Contains").field(part).finish(),
            Self::Is(text) => f.debug_tuple("Is").field(text).finish(),
            Self::When(_) => f.write_str("When(..)"),
        }
    }
}

#[derive(Debug)]
struct Rule {
    matcher: Matcher,
    script: Arc<Script>,
    /// Turns that may still take it; absent: all.
    left: Option<u32>,
    /// The turns that took it, so that the later requests of one turn stay with their script.
    taken_by: Vec<u64>,
}

#[derive(Debug, Default)]
struct Counters {
    by_key: HashMap<String, u32>,
    order: std::collections::VecDeque<String>,
}

#[derive(Debug)]
struct Inner {
    default_reply: Script,
    log: Mutex<Log>,
    logged: watch::Sender<u64>,
    ended: watch::Sender<u64>,
    rules: Mutex<Vec<Rule>>,
    counters: Mutex<Counters>,
    gates: Gates,
}

/// A handle on a scripted model. Clones are the same model.
#[derive(Debug, Clone)]
pub struct Models {
    inner: Arc<Inner>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Models {
    pub(crate) fn new(options: &Options) -> Self {
        Self {
            inner: Arc::new(Inner {
                default_reply: options.default_reply.clone(),
                log: Mutex::new(Log::new(options.max_records.max(1), options.max_body_bytes)),
                logged: watch::Sender::new(0),
                ended: watch::Sender::new(0),
                rules: Mutex::default(),
                counters: Mutex::default(),
                gates: Gates::default(),
            }),
        }
    }

    /// Adds a rule for every turn it matches. Rules are tried in the order they were added, before markers.
    pub fn rule(&self, matcher: Matcher, script: Script) {
        self.add_rule(matcher, script, None);
    }

    /// Adds a rule for the next `times` turns it matches.
    ///
    /// A turn is known by its text, its place in the conversation and the engine's session (`metadata.user_id`): its
    /// later and its retried requests do not count again. (A second try of a failed turn in the same session looks the
    /// same; for "fails, then works" use [`FaultRule::times`].)
    pub fn rule_times(&self, matcher: Matcher, script: Script, times: u32) {
        self.add_rule(matcher, script, Some(times));
    }

    /// The script of the next turn, whatever it says. Several calls make a queue.
    pub fn next(&self, script: Script) {
        self.add_rule(Matcher::Any, script, Some(1));
    }

    fn add_rule(&self, matcher: Matcher, script: Script, left: Option<u32>) {
        lock(&self.inner.rules).push(Rule { matcher, script: Arc::new(script), left, taken_by: Vec::new() });
    }

    /// Forgets all rules.
    pub fn clear_rules(&self) {
        lock(&self.inner.rules).clear();
    }

    /// Forgets log, rules, counters and gates. Replies that wait at a gate go on.
    pub fn reset(&self) {
        self.clear_rules();
        lock(&self.inner.log).reset();
        *lock(&self.inner.counters) = Counters::default();
        self.inner.gates.reset();
        self.inner.logged.send_replace(0);
    }

    /// All requests kept, oldest first.
    #[must_use]
    pub fn requests(&self) -> Vec<Arc<Record>> {
        self.select(|_| true)
    }

    /// How many requests ever came, of any kind.
    #[must_use]
    pub fn total(&self) -> u64 {
        lock(&self.inner.log).total()
    }

    /// The main requests whose turn text contains `text`, oldest first: tool steps and retries included.
    #[must_use]
    pub fn requests_for(&self, text: &str) -> Vec<Arc<Record>> {
        self.select(|record| record.kind() == RequestKind::Main && record.turn_text().contains(text))
    }

    /// How many [`requests_for`](Self::requests_for) there are.
    #[must_use]
    pub fn count_for(&self, text: &str) -> usize {
        self.requests_for(text).len()
    }

    /// The requests for which `test` is true, oldest first.
    pub fn select(&self, test: impl Fn(&Record) -> bool) -> Vec<Arc<Record>> {
        lock(&self.inner.log).iter().filter(|record| test(record)).cloned().collect()
    }

    /// Waits until `count` requests are there for which `test` is true, and returns them.
    ///
    /// Cancel safe.
    ///
    /// # Errors
    /// [`Error::TimedOut`] after `limit`, with what there was instead.
    pub async fn wait_requests(
        &self,
        count: usize,
        limit: Duration,
        test: impl Fn(&Record) -> bool,
    ) -> Result<Vec<Arc<Record>>, Error> {
        let mut logged = self.inner.logged.subscribe();
        let wait = async {
            loop {
                logged.borrow_and_update();
                let found = self.select(&test);
                if found.len() >= count || logged.changed().await.is_err() {
                    return found;
                }
            }
        };
        tokio::time::timeout(limit, wait).await.map_err(|_| Error::TimedOut {
            what: format!("{count} matching requests"),
            limit,
            seen: format!("seen: {}", self.glance()),
        })
    }

    /// Waits until `count` main requests are there whose turn text contains `text`.
    ///
    /// # Errors
    /// As [`wait_requests`](Self::wait_requests).
    pub async fn wait_for_text(
        &self,
        text: &str,
        count: usize,
        limit: Duration,
    ) -> Result<Vec<Arc<Record>>, Error> {
        self.wait_requests(count, limit, |record| {
            record.kind() == RequestKind::Main && record.turn_text().contains(text)
        })
        .await
    }

    /// Waits until the answer to this request has ended, and returns how. Cancel safe.
    ///
    /// # Errors
    /// [`Error::TimedOut`] after `limit`.
    pub async fn wait_ending(&self, record: &Record, limit: Duration) -> Result<Ending, Error> {
        let mut ended = self.inner.ended.subscribe();
        let wait = ended.wait_for(|_| record.ending() != Ending::Open);
        let waited = tokio::time::timeout(limit, wait).await.is_ok();
        if waited {
            return Ok(record.ending());
        }
        Err(Error::TimedOut {
            what: format!("the end of request #{}", record.number()),
            limit,
            seen: format!("requests: {}", self.glance()),
        })
    }

    /// Waits until a reply has come to this gate. Cancel safe.
    ///
    /// # Errors
    /// [`Error::TimedOut`] after `limit`.
    pub async fn wait_gate(&self, name: &str, limit: Duration) -> Result<GateState, Error> {
        self.wait_gate_times(name, 1, limit).await
    }

    /// Waits until this gate was reached `at_least` so often. Cancel safe.
    ///
    /// # Errors
    /// [`Error::TimedOut`] after `limit`.
    pub async fn wait_gate_times(
        &self,
        name: &str,
        at_least: u64,
        limit: Duration,
    ) -> Result<GateState, Error> {
        self.inner.gates.wait(name, at_least, limit).await.map_err(|state| Error::TimedOut {
            what: format!("gate {name} reached {at_least} times"),
            limit,
            seen: format!("reached {} times; requests: {}", state.reached, self.glance()),
        })
    }

    /// Opens a gate for good: replies at it and those to come go through.
    pub fn release_gate(&self, name: &str) -> GateState {
        self.inner.gates.set_open(name, true)
    }

    /// Closes a gate again.
    pub fn close_gate(&self, name: &str) -> GateState {
        self.inner.gates.set_open(name, false)
    }

    /// Where a gate stands.
    #[must_use]
    pub fn gate(&self, name: &str) -> GateState {
        self.inner.gates.state(name)
    }

    pub(crate) async fn pass_gate(&self, name: &str) {
        self.inner.gates.pass(name).await;
    }

    pub(crate) fn record(&self, record: Record) -> Arc<Record> {
        let mut log = lock(&self.inner.log);
        let record = log.push(record);
        // Sent under the lock, so that the value never goes back.
        self.inner.logged.send_replace(log.total());
        record
    }

    /// The mark that notes how the answer to this request ends.
    pub(crate) fn end_mark(&self, record: &Record) -> EndMark {
        EndMark::new(record, self.inner.ended.clone())
    }

    /// The reply that is due, with its index in the script.
    ///
    /// # Errors
    /// [`Error::Grammar`] if the turn's text holds a malformed marker.
    pub(crate) fn choose(&self, conversation: &Conversation) -> Result<(usize, Reply), Error> {
        let step = conversation.step();
        if let Some(script) = self.rule_for(conversation) {
            let (index, reply) = script.reply(step);
            return Ok((index, reply.clone()));
        }
        let marked = grammar::parse(conversation.turn_text())?;
        let (index, reply) = marked.as_ref().unwrap_or(&self.inner.default_reply).reply(step);
        Ok((index, reply.clone()))
    }

    fn rule_for(&self, conversation: &Conversation) -> Option<Arc<Script>> {
        let turn = conversation.turn_key();
        let mut rules = lock(&self.inner.rules);
        // A turn that has taken a limited rule stays with it, before any other is asked.
        if let Some(rule) = rules.iter().find(|rule| rule.taken_by.contains(&turn)) {
            return Some(Arc::clone(&rule.script));
        }
        let rule =
            rules.iter_mut().find(|rule| rule.left != Some(0) && rule.matcher.matches(conversation))?;
        if let Some(left) = &mut rule.left {
            *left -= 1;
            rule.taken_by.push(turn);
        }
        Some(Arc::clone(&rule.script))
    }

    /// Whether this fault is due now; counts it if so.
    pub(crate) fn fault_is_due(&self, rule: &FaultRule, turn_text: &str, reply: usize, part: usize) -> bool {
        let Some(times) = rule.times else { return true };
        let key = match &rule.scope {
            Some(scope) => format!("s:{scope}"),
            None => format!("t:{reply}:{part}:{turn_text}"),
        };
        let mut counters = lock(&self.inner.counters);
        if !counters.by_key.contains_key(&key) {
            counters.order.push_back(key.clone());
            if counters.order.len() > MAX_COUNTERS
                && let Some(oldest) = counters.order.pop_front()
            {
                counters.by_key.remove(&oldest);
            }
        }
        let so_far = counters.by_key.entry(key).or_default();
        if *so_far >= times {
            return false;
        }
        *so_far += 1;
        true
    }

    /// The last requests in one line, for messages of failed tests.
    fn glance(&self) -> String {
        let log = lock(&self.inner.log);
        let lines: Vec<String> = log
            .iter()
            .rev()
            .take(8)
            .map(|record| {
                let text: String = record.turn_text().chars().take(60).collect();
                format!(
                    "#{} {} {} step {} {text:?}",
                    record.number(),
                    record.method(),
                    record.path(),
                    record.step()
                )
            })
            .collect();
        if lines.is_empty() { "nothing".to_owned() } else { lines.join(", ") }
    }
}
