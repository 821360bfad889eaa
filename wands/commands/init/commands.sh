# {{ variant.name }}, {{ "full finetune" if options.full else "LoRA" }}, on {{ best.workload.world_size }} x {{ best.task.machine.name }}, with {{ best.ds_name }}. wands init wrote this file.
# {{ "{:,}".format(report.clips | length) }} clips were decoded{% if report.num_skipped %}, and {{ "{:,}".format(report.num_skipped) }} were not{% endif %}. Rejected clips: {{ "{:,}".format(report.count("rejected")) }}.
# The training has {{ "{:,}".format(steps) }} steps. Predictions: {{ time(steps * best.seconds) }}, {{ best.memory.needed | gib }} of GPU memory.
# The file recipe.yaml contains the reasons for the settings. Run all commands with: bash -e commands.sh

# 1. Show which clips can be used. Rejected clips do not stop the script.
wands check {{ clips }} --model {{ model | quote }} --max-tokens {{ best.workload.recipe.packing.max_tokens }} --bins-per-step {{ best.workload.recipe.train.bins_per_step }} --html {{ (out ~ "/clips.html") | quote }} || true

# 2. Encode the clips and captions once.
wands preprocess {{ clips }} --model {{ model | quote }} --out {{ (out ~ "/cache") | quote }}
{%- if best.task.ranks_per_node > 1 %} --workers {{ best.task.ranks_per_node }}{% endif %}
{%- if not has_room %} --text-device cpu{% endif %}


# 3. Train. The page report.html in the folder run shows the progress.
{{ train }}

# 4. Sample the prompts of prompts.jsonl with the trained weights.
wands infer --model {{ model | quote }} --checkpoint {{ (out ~ "/run") | quote }} --prompts-file {{ (out ~ "/prompts.jsonl") | quote }} --out {{ (out ~ "/samples") | quote }}
{# In GB: the text encoder takes 11.4, decoding up to 12, the CUDA context less than 2, and the model 2 bytes for each weight. #}
{%- set memory, dit = best.task.machine.memory / 1e9, 2e-9 * variant.dit.num_params -%}
{%- if memory < 25 + dit * variant.experts | length %} --offload {{ "model" if memory > [13.4, dit + 2] | max else "sequential" }}{% endif %}
