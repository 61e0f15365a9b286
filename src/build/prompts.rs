//! The built-in calibration prompts: general instructions, made from a few lists.
//!
//! They stand in for traffic that is not known yet; `--calibration FILE` is better when some is.

use rand::seq::{IndexedRandom, SliceRandom};
use rand_chacha::ChaCha8Rng;

const TOPICS: [&str; 48] = [
    "the water cycle",
    "compound interest",
    "learning to swim",
    "renewable energy",
    "bread baking",
    "time zones",
    "electric cars",
    "the printing press",
    "garden soil",
    "sleep",
    "chess openings",
    "public libraries",
    "volcanoes",
    "a job interview",
    "recycling",
    "the human heart",
    "city planning",
    "black holes",
    "first aid",
    "jazz",
    "bicycle repair",
    "photosynthesis",
    "budgeting",
    "the Silk Road",
    "a thunderstorm",
    "computer memory",
    "honey bees",
    "vaccines",
    "mountain hiking",
    "coffee",
    "the French Revolution",
    "probability",
    "sailing",
    "antibiotics",
    "a family reunion",
    "mobile phones",
    "the moon landing",
    "climate and weather",
    "painting",
    "remote work",
    "online shopping",
    "rivers",
    "musical instruments",
    "healthy snacks",
    "space telescopes",
    "good manners",
    "house plants",
    "languages",
];

const REQUESTS: [&str; 20] = [
    "Explain {} to a ten-year-old.",
    "Write a short paragraph about {}.",
    "Give me five facts about {}.",
    "What are the advantages and disadvantages of {}?",
    "Write a short poem about {}.",
    "List three common mistakes people make with {}.",
    "Summarise why {} matters, in two sentences.",
    "Write a dialogue between a teacher and a student about {}.",
    "How has our understanding of {} changed over the last century?",
    "Draft a polite email that asks a colleague about {}.",
    "Suggest a title and an outline for an essay on {}.",
    "Write a quiz question about {} with four answers, and say which one is right.",
    "Describe {} without using the letter z.",
    "What should a beginner know about {}?",
    "Tell a short story in which {} plays a part.",
    "Compare {} with something from everyday life.",
    "Write a Python function that stores notes about {} in a dictionary.",
    "Turn your knowledge of {} into a table with two columns.",
    "Which numbers are often quoted about {}? Answer step by step.",
    "Translate the sentence \"I would like to know more about {}\" into French and explain it.",
];

/// `count` different prompts in an order that `rng` decides; fewer when the lists run out.
pub fn builtin(count: usize, rng: &mut ChaCha8Rng) -> Vec<String> {
    let mut prompts = Vec::with_capacity(count);
    let mut topics = TOPICS.to_vec();
    while prompts.len() < count && prompts.len() < TOPICS.len() * REQUESTS.len() {
        topics.shuffle(rng);
        for topic in &topics {
            let Some(request) = REQUESTS.choose(rng) else { break };
            let prompt = request.replace("{}", topic);
            if !prompts.contains(&prompt) {
                prompts.push(prompt);
            }
        }
    }
    prompts.truncate(count);
    prompts
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    #[test]
    fn prompts_are_distinct_and_repeatable() {
        let make = |seed| builtin(300, &mut ChaCha8Rng::seed_from_u64(seed));
        let prompts = make(7);
        assert_eq!(prompts.len(), 300);
        assert_eq!(prompts, make(7));
        assert_ne!(prompts, make(8));
        let mut unique = prompts.clone();
        unique.sort();
        unique.dedup();
        assert_eq!(unique.len(), 300);
        assert_eq!(builtin(5000, &mut ChaCha8Rng::seed_from_u64(1)).len(), 960);
    }
}
