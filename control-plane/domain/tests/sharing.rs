//! Whole conversations across agents and engines, played by the rules alone: whatever happens, a session that takes a
//! message has been told everything that was said before it, once and in order.

#![expect(clippy::unwrap_used, reason = "a failed test is a panic")]

use std::collections::{BTreeSet, HashMap};

use proptest::prelude::*;
use roundhouse_domain::agent_file::{AgentSnapshot, Permissions, Trigger};
use roundhouse_domain::context::{
    DEFAULT_BUDGET_CHARS, HistoryMessage, Purpose, Request, Speaker, Summary, compose,
};
use roundhouse_domain::id::{ConversationId, SessionId, TurnId, WorkspaceId};
use roundhouse_domain::message::Position;
use roundhouse_domain::session::{
    Choice, NativeRef, PromptUse, Session, SessionState, Want, choose, watermark_at_acceptance,
    watermark_at_end,
};
use roundhouse_domain::time::Timestamp;

/// How a turn goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Completed,
    /// Before the engine took the message.
    NeverTaken,
    /// After it did, with or without some text.
    Interrupted {
        text: bool,
    },
    /// The session is found unusable at its opening, and is replaced in the same turn.
    Replaced,
}

/// One thing that happens.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// A message to one of three agents, in one of two workspaces.
    Turn { agent: usize, workspace: usize, fate: Fate },
    /// The last turn again, if it may be tried again.
    Retry(Fate),
    /// An agent's prompt is edited.
    Edit(usize),
    /// A person marks the agent's sessions unusable.
    Mark(usize),
    /// Somebody writes a summary of all there is.
    Summarise,
}

fn fates() -> impl Strategy<Value = Fate> {
    prop_oneof![
        5 => Just(Fate::Completed),
        1 => Just(Fate::NeverTaken),
        2 => any::<bool>().prop_map(|text| Fate::Interrupted { text }),
        1 => Just(Fate::Replaced),
    ]
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        10 => (0usize..3, 0usize..2, fates())
            .prop_map(|(agent, workspace, fate)| Step::Turn { agent, workspace, fate }),
        3 => fates().prop_map(Step::Retry),
        1 => (0usize..3).prop_map(Step::Edit),
        1 => (0usize..3).prop_map(Step::Mark),
        1 => Just(Step::Summarise),
    ]
}

/// What was said, as stored.
struct Said {
    speaker: Speaker,
    text: String,
    incomplete: bool,
}

/// The last turn, as far as a retry needs it.
#[derive(Clone)]
struct Last {
    agent: AgentSnapshot,
    workspace: usize,
    position: u64,
    ended_well: bool,
}

/// A conversation and what each engine really has been told.
struct World {
    agents: Vec<AgentSnapshot>,
    history: Vec<Said>,
    sessions: Vec<Session>,
    /// Positions that each native session was told, in the order of telling.
    told: HashMap<SessionId, Vec<u64>>,
    /// The last position that a summary given to the session stood for.
    summarised: HashMap<SessionId, u64>,
    summary: Option<u64>,
    last: Option<Last>,
    clock: i64,
}

fn agent(name: &str, engine: &str) -> AgentSnapshot {
    AgentSnapshot {
        file: format!("{name}.md"),
        name: name.into(),
        description: "for tests".into(),
        engine: engine.into(),
        model: "m".into(),
        reasoning_effort: None,
        permissions: Permissions::Ask,
        enabled: true,
        triggers: BTreeSet::from([Trigger::Manual]),
        text: format!("---\nname: {name}\n---\nprompt\n"),
        sha256: String::new(),
    }
}

fn workspace(n: usize) -> WorkspaceId {
    WorkspaceId::parse(format!("wsp_{n}")).unwrap()
}

impl World {
    fn new() -> Self {
        Self {
            // The third agent's engine cannot apply a changed prompt to a session.
            agents: vec![agent("one", "claude-code"), agent("two", "codex"), agent("three", "rigid")],
            history: Vec::new(),
            sessions: Vec::new(),
            told: HashMap::new(),
            summarised: HashMap::new(),
            summary: None,
            last: None,
            clock: 0,
        }
    }

    fn say(&mut self, speaker: Speaker, text: String, incomplete: bool) -> u64 {
        self.history.push(Said { speaker, text, incomplete });
        self.history.len() as u64
    }

    fn play(&mut self, step: Step) {
        match step {
            Step::Turn { agent, workspace, fate } => {
                let agent = self.agents[agent].clone();
                let position = self.say(Speaker::User, format!("question {}", self.history.len()), false);
                self.turn(Last { agent, workspace, position, ended_well: false }, fate);
            }
            Step::Retry(fate) => {
                if let Some(last) = self.last.clone().filter(|last| !last.ended_well) {
                    self.turn(last, fate);
                }
            }
            Step::Edit(agent) => self.agents[agent].text.push_str("edited\n"),
            Step::Mark(agent) => {
                let name = self.agents[agent].name.clone();
                for session in self.sessions.iter_mut().filter(|s| s.agent_name == name) {
                    session.state = SessionState::Unusable("a person said so".into());
                }
            }
            Step::Summarise => {
                if !self.history.is_empty() {
                    self.summary = Some(self.history.len() as u64);
                }
            }
        }
    }

    fn turn(&mut self, turn: Last, fate: Fate) {
        let conversation_id = ConversationId::parse("cnv_1").unwrap();
        let workspace_id = workspace(turn.workspace);
        let want = Want {
            conversation_id: &conversation_id,
            workspace_id: &workspace_id,
            agent: &turn.agent,
            prompt_change_on_resume: turn.agent.engine != "rigid",
        };
        let in_workspace: Vec<Session> =
            self.sessions.iter().filter(|s| s.workspace_id == workspace_id).cloned().collect();
        let mut at = match choose(&in_workspace, &want, |_, _| true) {
            Choice::Resume { session_id, prompt } => {
                let at = self.sessions.iter().position(|s| s.id == session_id).unwrap();
                assert_ne!(prompt, PromptUse::Initial);
                at
            }
            Choice::New { .. } => self.new_session(&turn, None),
        };
        if fate == Fate::Replaced && self.sessions[at].native_ref.is_some() {
            self.sessions[at].state = SessionState::Unusable("rows are missing".into());
            let replaces = self.sessions[at].id.clone();
            at = self.new_session(&turn, Some(replaces));
        }
        self.clock += 1;
        self.sessions[at].use_time = Timestamp(self.clock);
        self.sessions[at].prompt_sha256 = turn.agent.prompt_sha256();
        let given = self.context(at, &turn);
        let taken = fate != Fate::NeverTaken;
        if taken {
            self.take(at, &turn, &given);
        }
        let (completed, text) = match fate {
            Fate::Completed | Fate::Replaced => (true, true),
            Fate::NeverTaken => (false, false),
            Fate::Interrupted { text } => (false, text),
        };
        let answer =
            text.then(|| self.say(Speaker::Agent, format!("answer {}", self.history.len()), !completed));
        let session = &mut self.sessions[at];
        session.watermark = watermark_at_end(session.watermark, completed && taken, answer.map(Position));
        if let (true, Some(answer)) = (completed, answer) {
            self.told.get_mut(&session.id).unwrap().push(answer);
        }
        self.last = Some(Last { ended_well: completed, ..turn });
    }

    fn new_session(&mut self, turn: &Last, replaces: Option<SessionId>) -> usize {
        let id = SessionId::parse(format!("ses_{}", self.sessions.len() + 1)).unwrap();
        self.told.insert(id.clone(), Vec::new());
        self.sessions.push(Session {
            id,
            conversation_id: ConversationId::parse("cnv_1").unwrap(),
            workspace_id: workspace(turn.workspace),
            agent_name: turn.agent.name.clone(),
            engine: turn.agent.engine.clone(),
            model: turn.agent.model.clone(),
            prompt_sha256: turn.agent.prompt_sha256(),
            state: SessionState::Active,
            native_ref: None,
            watermark: Position::START,
            replaces,
            created_by: TurnId::parse("trn_1").unwrap(),
            create_time: Timestamp(self.clock),
            use_time: Timestamp(self.clock),
        });
        self.sessions.len() - 1
    }

    /// What the session is given beside the message: positions, and the position that a summary stands for.
    fn context(&self, at: usize, turn: &Last) -> (Vec<u64>, Option<u64>) {
        let session = &self.sessions[at];
        let history: Vec<HistoryMessage<'_>> = (1..)
            .zip(&self.history)
            .map(|(position, said)| HistoryMessage {
                position,
                speaker: said.speaker,
                name: None,
                text: &said.text,
                incomplete: said.incomplete,
            })
            .collect();
        let summary = self.summary.map(|through| Summary { text: "what was said", through });
        let purpose = if session.native_ref.is_none() {
            Purpose::Seed { agent_prompt: None, summary }
        } else {
            Purpose::CatchUp { after: session.watermark.0 }
        };
        let request = Request {
            purpose,
            history: &history,
            own_position: Some(turn.position),
            own_text: "",
            budget: DEFAULT_BUDGET_CHARS,
        };
        match compose(&request).unwrap() {
            Some(composed) => (composed.given, composed.summary.then_some(self.summary).flatten()),
            None => (Vec::new(), None),
        }
    }

    /// The engine takes context and message in one delivery.
    fn take(&mut self, at: usize, turn: &Last, (given, summary): &(Vec<u64>, Option<u64>)) {
        let session = &mut self.sessions[at];
        session.native_ref = Some(NativeRef(vec![1]));
        session.watermark = watermark_at_acceptance(
            session.watermark,
            Position(turn.position),
            given.last().copied().map(Position),
        );
        let id = session.id.clone();
        if let Some(through) = summary {
            self.summarised.insert(id.clone(), *through);
        }
        let told = self.told.get_mut(&id).unwrap();
        assert!(given.is_sorted(), "in order: {given:?}");
        told.extend(given);
        let again = told.contains(&turn.position);
        if !again {
            told.push(turn.position);
        }
        let covered = self.summarised.get(&id).copied().unwrap_or(0);
        let mut count: HashMap<u64, usize> = HashMap::new();
        for position in told.iter() {
            *count.entry(*position).or_default() += 1;
        }
        for position in 1..=self.history.len() as u64 {
            // The messages after this one wait and have no place yet, so all that has a place must be known.
            let times = count.get(&position).copied().unwrap_or(0);
            let summarised = position <= covered;
            assert!(
                times == 1 || (times == 0 && summarised),
                "position {position} told {times} times: {told:?}"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]
    #[test]
    fn s12_a_session_that_takes_a_message_knows_everything_before_it_once(
        steps in prop::collection::vec(steps(), 1..40),
    ) {
        let mut world = World::new();
        for step in steps {
            world.play(step);
        }
        // S10: nothing is deleted or overwritten on a switch, and unusable is for ever.
        prop_assert_eq!(world.sessions.len(), world.told.len());
        for session in &world.sessions {
            prop_assert!(session.watermark.0 <= world.history.len() as u64);
        }
    }
}
