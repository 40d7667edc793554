//! Who dies, and when.

use std::{collections::BTreeMap, time::Instant};

use roundhouse_test_support::{BRIEF, Follower, Stack, census, signal, wait_until};

use super::{Dice, Until};

/// How long one is stopped who is continued.
const STOPPED_FOR: std::time::Duration = std::time::Duration::from_millis(300);

/// How long a moment is waited for at most.
const MOMENT: std::time::Duration = std::time::Duration::from_secs(1);

/// Kills until it is enough. Answers how often each.
pub(super) async fn kill(
    stack: &mut Stack,
    dice: &mut Dice,
    seen: &[Follower],
    until: Until,
) -> anyhow::Result<BTreeMap<&'static str, usize>> {
    let begun = Instant::now();
    let mut kills: BTreeMap<&'static str, usize> = BTreeMap::new();
    loop {
        let enough = match until {
            Until::Kills(wanted) => kills.values().sum::<usize>() >= wanted,
            Until::Time(time) => begun.elapsed() >= time,
        };
        if enough {
            return Ok(kills);
        }
        // A moment is so many items of the streams further on.
        let count = || seen.iter().map(|follower| follower.items().len()).sum::<usize>();
        let wanted = count() + usize::try_from(dice.roll(10))?;
        // One in which nothing moves is a moment, too.
        let _ = wait_until("something happens", MOMENT, || count() >= wanted).await;
        let what = one(stack, dice).await?;
        stack.log.line("test", &format!("died: {what}"));
        *kills.entry(what).or_default() += 1;
    }
}

async fn one(stack: &mut Stack, dice: &mut Dice) -> anyhow::Result<&'static str> {
    use census::Role::{Engine, Init, Keeper};
    let (cast, which) = (dice.roll(20), dice.roll(u64::from(u32::MAX)));
    let role = match cast {
        0..=3 => {
            stack.runner.kill().await?;
            stack.runner.start_again().await?;
            return Ok("runner");
        }
        4..=7 => {
            stack.control_plane.kill().await?;
            stack.control_plane.start_again().await?;
            return Ok("control plane");
        }
        8 => {
            stack.kill_both().await?;
            stack.start_both().await?;
            return Ok("both services");
        }
        9 => {
            let all = stack.census();
            stack.runner.kill().await?;
            end(&all).await?;
            stack.runner.start_again().await?;
            return Ok("host");
        }
        10 => {
            let service = if which % 2 == 0 { &stack.runner } else { &stack.control_plane };
            pause(service.pid()).await?;
            return Ok("a service stopped for a moment");
        }
        11..=13 => Keeper,
        14..=15 => Init,
        _ => Engine,
    };
    let living: Vec<_> = stack.census().into_iter().filter(|one| one.role == role).collect();
    let Some(victim) = living.get(usize::try_from(which)? % living.len().max(1)) else {
        // Nobody is there to die: the runner does.
        stack.runner.kill().await?;
        stack.runner.start_again().await?;
        return Ok("runner");
    };
    if cast == 19 {
        pause(Some(victim.pid)).await?;
        return Ok("an engine stopped for a moment");
    }
    end(std::slice::from_ref(victim)).await?;
    Ok(match role {
        Keeper => "keeper",
        Init => "init",
        _ => "engine",
    })
}

async fn end(victims: &[census::Process]) -> anyhow::Result<()> {
    for one in victims.iter().filter(|one| census::is_alive(one.pid)) {
        // Who went down with another meanwhile is gone already.
        let _ = signal(one.pid, "KILL");
    }
    wait_until("they are gone", BRIEF, || !victims.iter().any(|one| census::is_alive(one.pid))).await
}

async fn pause(pid: Option<u32>) -> anyhow::Result<()> {
    let Some(pid) = pid else { return Ok(()) };
    if signal(pid, "STOP").is_err() {
        return Ok(());
    }
    let since = Instant::now();
    wait_until("the stop is over", BRIEF, || since.elapsed() >= STOPPED_FOR).await?;
    // Somebody may have killed it meanwhile.
    let _ = signal(pid, "CONT");
    Ok(())
}
