# All values come from `python -m ami`, which resolves the base image and checks them: docs/images.md.
variable "image" { type = string }              # neuron or cuda
variable "region" { type = string }             # that builds
variable "copy_regions" { type = list(string) } # more regions that get the image
variable "base_image" { type = string }         # id, resolved before the build and kept in the image's tags
variable "root_device" { type = string }        # device name of the base image's root volume
variable "name" { type = string }
variable "instance_type" { type = string }    # the builder, with the accelerator that the smoke test looks for
variable "subnet" { type = string }           # id; empty: one of the default VPC
variable "disk_gib" { type = number }         # of the root volume
variable "cache_arns" { type = list(string) } # compile cache, which the builder may read: bucket and objects, or none
variable "deprecate_at" { type = string }     # when EC2 no longer offers the image
variable "tags" { type = map(string) }        # of the image and its snapshots: versions, commit, base image
variable "build_tags" { type = map(string) }  # of all that exists only during the build: what is left is found by them
variable "files" { type = string }            # folder with image.env, functions.sh, constraints.txt and the wheel
variable "max_minutes" { type = number }      # after which the builder ends itself, whatever became of Packer
