# {{ variant.name }}, {{ "full finetune" if options.full else "LoRA" }}, on {{ best.workload.world_size }} x {{ best.task.machine.name }}, with {{ best.ds_name }}. wands init wrote this file.
# {{ "{:,}".format(report.clips | length) }} clips were decoded{% if report.num_skipped %}, and {{ "{:,}".format(report.num_skipped) }} were not{% endif %}. Rejected clips: {{ "{:,}".format(rejected | length) }}.
{% for clip in rejected[:shown] %}
#   {{ (clip.key | name ~ ": " ~ clip.reason) | text }}
{% endfor %}
{% if rejected | length > shown %}
#   ... and {{ "{:,}".format(rejected | length - shown) }} more, which the page of the first command lists.
{% endif %}
{% for kind, count in warnings %}
# Warning: {{ kind | text }} ({{ "{:,}".format(count) }} of the clips).
{% endfor %}
{% for note in report.notes %}
# Note: {{ note | text }}.
{% endfor %}
# The training has {{ "{:,}".format(steps) }} steps. Predictions: {{ time(steps * best.seconds) }}, {{ best.memory.needed | gib }} of GPU memory, {{ best.host | gib }} of host memory in each node.
{% if options.gpu_memory and not options.hardware %}
# The time is predicted for the GPU in the first line. If you have another GPU, name it with --hardware, such as rtx3090 or a100-80gb.
{% endif %}
{% if steps * best.seconds > 7200 %}
# Shorter or smaller samples train faster: wands init --max-frames 49 --max-pixels 200000. The model Wan-AI/Wan2.2-TI2V-5B-Diffusers also trains faster.
{% endif %}
# Files: {{ out | text }}. There, recipe.yaml contains the reasons for the settings.
# Run them on the GPUs above, in an environment with wands. Run all commands with: bash -e {{ (out ~ "/commands.sh") | quote | text }}

# 1. Show which clips can be used. Rejected clips do not stop the script.
wands check {{ clips }} --model {{ model | quote }} --max-tokens {{ best.workload.recipe.packing.max_tokens }} --bins-per-step {{ best.workload.recipe.train.bins_per_step }}{% if options.chunk_frames %} --chunk-frames {{ options.chunk_frames }}{% endif %} --html {{ (out ~ "/clips.html") | quote }} || true

# 2. Encode the clips and captions once.
wands preprocess {{ clips }} --model {{ model | quote }} --out {{ (out ~ "/cache") | quote }}
{%- if best.task.ranks_per_node > 1 %} --workers {{ best.task.ranks_per_node }}{% endif %}
{%- if not has_room %} --text-device cpu{% endif %}


# 3. Train. The page report.html in the folder run shows the progress. If the training stops, run this command again with --resume.
# If it has finished, go on with the next command.
{% if best.workload.world_size > best.task.ranks_per_node %}
# Run this command on every node, from a clone of wands. Replace R by the number of the node (0 for the first), and HOST by the first node.
{% endif %}
{{ train }}

# 4. Sample the prompts of prompts.jsonl with the trained weights.
wands infer{% if options.chunk_frames %} --causal{% endif %} --model {{ model | quote }} --checkpoint {{ (out ~ "/run") | quote }} --prompts-file {{ (out ~ "/prompts.jsonl") | quote }} --out {{ (out ~ "/samples") | quote }}
{#- In GB: the text encoder takes 11.4, decoding up to 12, the CUDA context less than 2, and the model 2 bytes for each weight. #}
{%- set memory, dit = best.task.machine.memory / 1e9, 2e-9 * variant.dit.num_params -%}
{%- if not options.chunk_frames and memory < 25 + dit * variant.experts | length %} --offload {{ "model" if memory > [13.4, dit + 2] | max else "sequential" }}{% endif %}
