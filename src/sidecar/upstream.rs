//! What the server is called: its target's name, asked for until it answers.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::OnceCell;
use tokio_util::sync::CancellationToken;

use super::teacher::{LiveTeacher, RescoreSettings, RescoreTeacher};
use crate::config::sidecar::{SidecarSettings, TeacherKind};
use crate::distill::teacher::{Teacher, TeacherError};
use crate::distill::{Sample, TopK};
use crate::vllm::Client;

const ASK_EVERY: Duration = Duration::from_secs(2);

/// Names under which the server serves the target itself. Adapters are other models: what they
/// answer is not the target's and must not be learned.
pub type TargetNames = Arc<ArcSwap<Vec<String>>>;

/// Asks the server for its target's names until it answers.
pub async fn learn_names(client: Client, names: TargetNames, shutdown: CancellationToken) {
    loop {
        match client.models().await {
            Ok(models) => {
                let own = models.into_iter().filter(|model| model.parent.is_none());
                names.store(Arc::new(own.map(|model| model.id).collect()));
                return;
            }
            Err(error) => tracing::debug!(%error, "the server does not list its models yet"),
        }
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(ASK_EVERY) => {}
        }
    }
}

/// The teacher that the settings name, made once the target's name is known.
#[allow(clippy::large_enum_variant)] // one exists in a process
pub enum ConfiguredTeacher {
    Live(LiveTeacher),
    Rescore {
        client: Client,
        settings: Box<RescoreSettings>,
        names: TargetNames,
        made: OnceCell<RescoreTeacher>,
    },
}

impl ConfiguredTeacher {
    pub fn new(settings: &SidecarSettings, client: Client, names: TargetNames) -> Self {
        if settings.teacher.kind == TeacherKind::Live {
            return Self::Live(LiveTeacher);
        }
        let mut rescore = RescoreSettings::new(&settings.upstream.model);
        rescore.top_k = settings.teacher.top_k;
        rescore.window = settings.teacher.window;
        rescore.yield_to_traffic = settings.teacher.yield_to_traffic;
        Self::Rescore { client, settings: Box::new(rescore), names, made: OnceCell::new() }
    }
}

impl Teacher for ConfiguredTeacher {
    async fn score(&self, sample: &Sample) -> Result<Vec<TopK>, TeacherError> {
        match self {
            Self::Live(teacher) => teacher.score(sample).await,
            Self::Rescore { client, settings, names, made } => {
                let make = || async {
                    let mut settings = settings.as_ref().clone();
                    if settings.model.is_empty() {
                        let unknown = || {
                            TeacherError::Unavailable("the server has not named its model".into())
                        };
                        settings.model = names.load().first().cloned().ok_or_else(unknown)?;
                    }
                    Ok(RescoreTeacher::new(client.clone(), settings))
                };
                made.get_or_try_init(make).await?.score(sample).await
            }
        }
    }
}
