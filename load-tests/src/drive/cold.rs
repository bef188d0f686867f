//! Cold starts one at a time: a model is made cold, then its first answer is timed.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use tokio::time::Instant;

use super::connect::{Answer, Connected, Failure, IndexLine};
use super::dice::Dice;
use super::inputs::ReadyRequest;
use super::load::{Running, judged, timed_out, told};
use super::outcome::ColdStartSeen;
use super::progress::Progress;
use super::recorder::{End, Seen};
use super::scenario::{Cold, MadeCold};

const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Times `repetitions` cold starts of every model in turn.
pub(crate) async fn drive(running: &Arc<Running>, cold: &Cold, progress: &Progress) -> Result<()> {
    let mut dice = Dice::new(running.load.seed, 3 << 32);
    let mut needs_load = vec![false; running.load.models.len()];
    for repetition in 1..=cold.repetitions {
        for (model, needs_load) in needs_load.iter_mut().enumerate() {
            let name = &running.load.models[model].name;
            progress.say(format!(
                "{repetition} of {}: {name} becomes cold",
                cold.repetitions
            ));
            tokio::select! {
                made = make_cold(&running.load.server, cold, name) => made?,
                () = progress.stopped() => {}
            }
            if progress.is_stopped() {
                return Ok(());
            }
            one(running, model, (&mut dice, needs_load)).await;
        }
    }
    Ok(())
}

/// Lets every model answer once, so that it is known and can be made cold.
pub(crate) async fn make_known(server: &Connected, cold: &Cold, models: &[&str]) -> Result<()> {
    for model in models {
        if cold.how == MadeCold::Unload && !server.is_ready(model).await? {
            server.load(model).await?;
        }
    }
    Ok(())
}

async fn one(running: &Arc<Running>, model: usize, (dice, needs_load): (&mut Dice, &mut bool)) {
    let asked = &running.load.models[model];
    let request = asked.next_request(dice);
    let timeout = running.load.timeout;
    let mut due = Instant::now();
    let mut load = None;
    let mut answer = Err(Failure::new("unavailable", "not asked yet"));
    if !*needs_load {
        answer = infer(running, request, timeout).await;
        // It may be that servers refuse what was unloaded until it is loaded.
        *needs_load = answer.as_ref().is_err_and(|failure| {
            !["connection", "timeout", "deadline", "DEADLINE_EXCEEDED"]
                .contains(&failure.kind.as_str())
        });
    }
    if *needs_load && answer.is_err() {
        due = Instant::now();
        answer = match running.load.server.load(&asked.name).await {
            Ok(()) => {
                load = Some(due.elapsed().as_secs_f64() * 1e3);
                infer(running, request, timeout).await
            }
            Err(error) => Err(Failure::new("load", format!("{error:#}"))),
        };
    }
    let ended = Instant::now();
    let end = match answer {
        Err(failure) => End::Failed(failure),
        Ok(answer) => match judged(request, &answer) {
            End::Answered { .. } => {
                let seen = answer.cold().map(told).unwrap_or_default();
                End::Answered {
                    cold: Some(Box::new(ColdStartSeen { load, ..seen })),
                }
            }
            wrong => wrong,
        },
    };
    let seen = Seen {
        model,
        due,
        sent: due,
        ended,
        end,
    };
    running.recorder().record(seen);
}

async fn infer(
    running: &Arc<Running>,
    request: &ReadyRequest,
    timeout: Duration,
) -> Result<Answer, Failure> {
    let asking = running.load.server.infer(&request.prepared, 0);
    match tokio::time::timeout(timeout, asking).await {
        Ok(answer) => answer,
        Err(_) => Err(timed_out(timeout)),
    }
}

async fn make_cold(server: &Connected, cold: &Cold, model: &str) -> Result<()> {
    if cold.how == MadeCold::Unload {
        server.unload(model).await?;
    }
    let started = Instant::now();
    loop {
        let is_cold = match server.index().await {
            Ok(lines) => is_cold(&lines, model),
            // Not every server has an index.
            Err(_) => !server.is_ready(model).await?,
        };
        if is_cold {
            return Ok(());
        }
        if started.elapsed() > cold.patience {
            bail!(
                "model '{model}' was not cold after {:?}: is its keep-alive longer?",
                cold.patience
            );
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

/// Whether no version of a model is loaded. Dormouse calls models that it would wake ready, and
/// says that they are asleep.
fn is_cold(lines: &[IndexLine], model: &str) -> bool {
    let mut of_model = lines.iter().filter(|line| line.model == model);
    of_model.all(|line| match line.state.as_str() {
        "READY" => line.reason == "asleep",
        "LOADING" | "UNLOADING" => false,
        _ => true,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_cold_when_none_of_its_versions_is_loaded() {
        let line = |model: &str, state: &str, reason: &str| IndexLine {
            model: model.to_owned(),
            state: state.to_owned(),
            reason: reason.to_owned(),
        };
        let lines = [
            line("triton", "UNAVAILABLE", "unloaded"),
            line("asleep", "READY", "asleep"),
            line("parked", "READY", "parked"),
            line("half", "READY", "asleep"),
            line("half", "READY", ""),
            line("busy", "UNLOADING", ""),
        ];
        for (model, wanted) in [
            ("triton", true),
            ("asleep", true),
            ("parked", false),
            ("half", false),
            ("busy", false),
        ] {
            assert_eq!(is_cold(&lines, model), wanted, "{model}");
        }
    }
}
