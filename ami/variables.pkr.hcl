# `baretrain ami` sets all values: see docs/images.md.
variable "image" { type = string }              # neuron or cuda
variable "region" { type = string }             # where the image is built
variable "copy_regions" { type = list(string) } # regions that get a copy
variable "base_image" { type = string }         # id, resolved before the build and kept in the image's tags
variable "name" { type = string }
variable "instance_type" { type = string }    # the builder, with the accelerator that the smoke test looks for
variable "subnet" { type = string }           # id; empty: a subnet of the default VPC
variable "deprecate_at" { type = string }     # when EC2 marks the image as deprecated
variable "tags" { type = map(string) }        # tags of the image and its snapshots: versions, commit, base image
variable "files" { type = string }            # folder with image.env, functions.sh, requirements and the wheel
variable "max_minutes" { type = number }      # after this time the builder shuts down, even if Packer is gone
