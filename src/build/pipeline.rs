//! The steps in order: read, shrink, distil, export.

use std::collections::BTreeSet;
use std::path::PathBuf;

use candle_core::Device;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::corpus::{self, Corpus, Wanted};
use super::generate::{Generation, answer};
use super::plan::Plan;
use super::stream::{Streamed, reference};
use super::teach::{TeachSettings, Teaching, UNTAUGHT};
use super::work::WorkFolder;
use super::{BuildError, Made, Progress, Report, Settings, Story, export, trim};
use crate::distill::{Reference, Sample};
use crate::hub::Target;
use crate::model::decoder::Decoder;
use crate::model::draft_folder::WriteError;
use crate::model::runtime::Runtime;

/// Draft length that mean accepted lengths are given for.
pub const NUM_SPECULATIVE_TOKENS: usize = 4;
/// Longest draft that is recommended.
pub const LONGEST_DRAFT: usize = 8;
/// Longest calibration window.
pub(super) const WINDOW: usize = 512;
/// Held-out prompts that acceptance is measured on, and the length of the answers.
const HELD_OUT: usize = 24;
const ANSWER: usize = 64;

/// Builds a draft of `target` and writes it to `settings.output`. What a build that was stopped
/// left behind beside the output is taken up when all settings are the same.
///
/// # Errors
/// See [`BuildError`]; nothing half-written is left at the output.
pub fn run(
    target: &Target,
    settings: &Settings,
    on_progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Report, BuildError> {
    let plans = settings.plans(target)?;
    check_output(settings)?;
    let key = (format!("{settings:?}"), &target.name, &target.config.raw);
    let work = WorkFolder::open(&settings.output, &key)?;
    let mut build =
        Build { target, streamed: Streamed::new(target), settings, work: &work, on_progress };
    let report = build.all(plans);
    // What failed for a reason that a second try would meet again is not worth keeping.
    if report.as_ref().err().is_none_or(|error| !error.may_be_resumed()) {
        work.clear()?;
    }
    report
}

/// Refuses at once what would fail after minutes of work.
fn check_output(settings: &Settings) -> Result<(), BuildError> {
    let output = &settings.output;
    if output.exists() {
        return Err(WriteError::Exists { path: output.clone() }.into());
    }
    let parent = output.parent().filter(|p| !p.as_os_str().is_empty());
    let parent = parent.unwrap_or(std::path::Path::new("."));
    std::fs::create_dir_all(parent)
        .and_then(|()| tempfile::tempfile_in(parent).map(drop))
        .map_err(|source| WriteError::Io { path: parent.into(), source }.into())
}

/// The target's own words.
#[derive(Serialize, Deserialize)]
pub(super) struct Text {
    pub(super) calibration: Vec<Sample>,
    pub(super) held_out: Vec<Sample>,
}

/// A build under way.
pub(super) struct Build<'a> {
    pub(super) target: &'a Target,
    pub(super) streamed: Streamed<'a>,
    pub(super) settings: &'a Settings,
    pub(super) work: &'a WorkFolder,
    pub(super) on_progress: &'a mut dyn FnMut(Progress<'_>),
}

const TEXT: &str = "text.json";
pub(super) const STORY: &str = "story.json";

impl Build<'_> {
    fn all(&mut self, plans: Vec<Plan>) -> Result<Report, BuildError> {
        let text = self.text()?;
        let reference = reference(self.streamed, &text.held_out, WINDOW)?;
        let mut made = match self.resumed()? {
            Some(made) => made,
            None => self.make(plans, &text, &reference)?,
        };
        if let Some(teach) = &self.settings.distill {
            self.distil(teach, &mut made, &text.held_out, &reference)?;
        }
        if let Some(most_used) = self.settings.vocab {
            self.trim(most_used, &mut made, &text, reference)?;
        }
        export::export(self.target, self.settings, &made, &text.calibration)
    }

    pub(super) fn tokens(samples: &[Sample]) -> usize {
        samples.iter().map(|s| s.prompt_ids.len() + s.output_ids.len()).sum()
    }

    fn corpus(&self, source: Option<&PathBuf>, tokens: usize) -> Result<Corpus, BuildError> {
        let mut rng = ChaCha8Rng::seed_from_u64(self.settings.seed);
        let wanted = Wanted { tokens, answer: ANSWER, held_out: HELD_OUT };
        corpus::read(self.target, source.map(PathBuf::as_path), wanted, &mut rng)
    }

    /// What to calibrate on, and what to judge by. The target answers what has no answer yet.
    fn text(&mut self) -> Result<Text, BuildError> {
        if let Some(text) = self.work.load::<Text>(TEXT) {
            return Ok(text);
        }
        let settings = self.settings;
        let corpus = self.corpus(settings.calibration.as_ref(), settings.calibration_tokens)?;
        let mut rng = ChaCha8Rng::seed_from_u64(settings.seed.wrapping_add(1));
        let total = (corpus.prompts.len() + corpus.held_out_prompts.len()) * ANSWER;
        (self.on_progress)(Progress::Started { step: "calibrate", total });
        let (mut calibration, mut held_out) = (corpus.samples, corpus.held_out);
        if total > 0 {
            let runtime = Runtime::load(&self.target.config, &self.target.weights)?;
            let on_progress = &mut self.on_progress;
            let mut tick = |units| on_progress(Progress::Advanced { units });
            let generation =
                Generation { temperature: settings.temperature, max_tokens: ANSWER, top_k: 0 };
            for (prompts, samples) in
                [(corpus.prompts, &mut calibration), (corpus.held_out_prompts, &mut held_out)]
            {
                let ids: Vec<Vec<u32>> = prompts.iter().map(|p| p.ids.clone()).collect();
                let mut answers = answer(&runtime, &ids, generation, &mut rng, &mut tick)?;
                for answer in &mut answers {
                    answer.domain.clone_from(&prompts[answer.id as usize].domain);
                }
                samples.extend(answers);
            }
        }
        let tokens = Self::tokens(&calibration);
        (self.on_progress)(Progress::Finished {
            step: "calibrate",
            detail: format!("{tokens} tokens, {} held-out answers", held_out.len()),
            scores: None,
        });
        let text = Text { calibration, held_out };
        self.work.keep(TEXT, &text)?;
        Ok(text)
    }

    /// The draft that a stopped build was distilling.
    fn resumed(&self) -> Result<Option<Made>, BuildError> {
        let Some(story) = self.work.load::<Story>(STORY) else { return Ok(None) };
        let folder = Target::open(&self.work.join(UNTAUGHT).display().to_string())?;
        let draft = Decoder::new(&folder.config, |name| {
            folder.weights.tensor(name, &Device::Cpu).map_err(BuildError::from)
        })?;
        Ok(Some(Made { draft, story, trimmed: None }))
    }

    fn distil(
        &mut self,
        teach: &TeachSettings,
        made: &mut Made,
        held_out: &[Sample],
        reference: &Reference,
    ) -> Result<(), BuildError> {
        let source = self.settings.prompts.as_ref().or(self.settings.calibration.as_ref());
        let mut corpus = self.corpus(source, teach.tokens)?;
        // Two sources, or two sizes of one, may hold the same prompt.
        let judging: BTreeSet<&[u32]> = held_out.iter().map(|s| s.prompt_ids.as_slice()).collect();
        corpus.prompts.retain(|prompt| !judging.contains(prompt.ids.as_slice()));
        if corpus.prompts.is_empty() {
            return Err(BuildError::NothingToLearn);
        }
        let runtime = Runtime::load(&self.target.config, &self.target.weights)?;
        let ids: Vec<Vec<u32>> = corpus.prompts.into_iter().map(|prompt| prompt.ids).collect();
        let teaching = Teaching {
            target: &runtime,
            prompts: &ids,
            reference,
            settings: teach,
            work: self.work,
        };
        let again = teach.select.map_or(0, |share| (teach.tokens as f64 * share) as usize);
        (self.on_progress)(Progress::Started { step: "distil", total: teach.tokens + again });
        let on_progress = &mut self.on_progress;
        let mut tick = |units| on_progress(Progress::Advanced { units });
        let (draft, curve) = teaching.run(NUM_SPECULATIVE_TOKENS, &mut tick)?;
        let last = curve.last().map_or(0, |(tokens, _)| *tokens);
        let best = curve.iter().max_by(|a, b| a.1.alpha.total_cmp(&b.1.alpha));
        let (at, scores) =
            best.cloned().ok_or_else(|| BuildError::Solve("nothing was measured".into()))?;
        (self.on_progress)(Progress::Finished {
            step: "distil",
            detail: format!("best after {at} of {last} answer tokens"),
            scores: Some(&scores),
        });
        made.draft = draft;
        made.story.steps.push(("distil".into(), scores));
        made.story.curve = curve;
        Ok(())
    }

    /// Cuts the vocabulary and measures what is left; the reference serves nothing else after.
    fn trim(
        &mut self,
        most_used: usize,
        made: &mut Made,
        text: &Text,
        mut reference: Reference,
    ) -> Result<(), BuildError> {
        let ids = text.calibration.iter().flat_map(|s| [&s.prompt_ids[..], &s.output_ids[..]]);
        let counts = trim::count(ids);
        let trimmed = trim::trim(&made.draft, self.target, &counts, most_used)?;
        let whole = trimmed.over_the_whole_vocabulary(&made.draft)?;
        reference.restrict(trimmed.ids.iter().flatten().copied());
        let total: u64 = counts.values().sum();
        let kept = trimmed.ids.iter().flatten().filter_map(|id| counts.get(id)).sum::<u64>();
        let coverage = &mut made.story.coverage;
        coverage.push(("calibration".into(), kept as f64 / total.max(1) as f64));
        for (language, sample) in trim::SAMPLES {
            let share = trim::coverage(&self.target.tokenizer, &trimmed.ids, sample)?;
            coverage.push((language.into(), share));
        }
        let detail = format!(
            "{} of {} tokens, {:.1} M parameters; of the text's tokens {}",
            trimmed.ids.len(),
            self.target.tokenizer.vocab_size(),
            trimmed.draft.config.parameters() as f64 / 1e6,
            coverage
                .iter()
                .map(|(name, share)| format!("{name} {:.0} %", 100.0 * share))
                .collect::<Vec<_>>()
                .join(", ")
        );
        let scores = reference.compare(&whole, None, 0.0, NUM_SPECULATIVE_TOKENS)?;
        (self.on_progress)(Progress::Finished { step: "trim", detail, scores: Some(&scores) });
        made.story.steps.push(("trim".into(), scores));
        made.trimmed = Some(trimmed);
        Ok(())
    }
}
